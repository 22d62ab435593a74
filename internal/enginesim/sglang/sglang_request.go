package enginesim

import (
	"bytes"
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// sglangRequest is SGLang's state of a request.
type sglangRequest struct {
	// batch: a native answer is a list.
	batch bool
	// items are the sequences' own fields, in choice order.
	items []sglangItem
	// logprobs are the requested log probabilities of the sequences of /generate, in
	// choice order.
	logprobs []sglangLogprobs
}

// sglangItem holds the fields of a request that differ between its sequences
// (GenerateReqInput in managers/io_struct.py).
type sglangItem struct {
	rid string
	// host and port are the address of the prefill's bootstrap registry for
	// decode; port 0 means decode's default.
	host string
	port int
	// room is the transfer's id, if hasRoom.
	room    int64
	hasRoom bool
	// prefillRank is disagg_prefill_dp_rank, -1 for none.
	prefillRank int
}

// nativeError marks errors of /generate, which have a special form.
const nativeError = "native"

// sglangFieldError is SGLang's answer to a body that its request models reject.
func sglangFieldError(route string, err *fieldError) *apiError {
	kind := "Bad Request"
	if route == routeGenerate {
		kind = nativeError
	}
	return &apiError{Status: http.StatusBadRequest, Type: kind, Message: "1 validation errors:\n  body." + err.Field + ": " + err.Message, Param: err.Field}
}

func (g *sglang) parse(route string, h http.Header, body []byte) (*request, *apiError) {
	f, ferr := decodeFields(body)
	var req *request
	batch := false
	switch {
	case ferr != nil:
	case route == routeGenerate:
		req, batch, ferr = parseGenerate(h, f)
	default:
		req, ferr = parseOpenAI(route, h, f)
		batch = ferr == nil && (req.N > 1 || !req.Chat && batchPrompt(f["prompt"]))
	}
	if ferr != nil {
		return nil, sglangFieldError(route, ferr)
	}
	items, ferr := parseItems(f, len(req.Prompts), req.N, batch)
	if ferr == nil && g.cfg.HeaderOverrides && route != routeCompletions {
		ferr = overrideItems(h, req, items)
	}
	if ferr == nil {
		ferr = g.parseRank(route, req)
	}
	if ferr != nil {
		return nil, sglangFieldError(route, ferr)
	}
	ext := &sglangRequest{batch: batch, items: items}
	if route == routeGenerate && req.N > 0 && req.N <= maxSamples {
		if ext.logprobs, ferr = parseLogprobs(f, len(req.Prompts), req.N); ferr != nil {
			return nil, sglangFieldError(route, ferr)
		}
	}
	req.Ext = ext
	req.ID = items[0].rid
	if g.mode == modeDecode {
		// Decode has a chunk cache: other requests reuse none of it.
		req.CacheSalt = "chunk cache " + newUUID()
	}
	if refusal := g.check(req); refusal != nil {
		if route == routeGenerate {
			refusal.Type = nativeError
		}
		return nil, refusal
	}
	return req, nil
}

// check does the checks of the tokenizer manager.
func (g *sglang) check(req *request) *apiError {
	if req.N < 1 {
		return badRequest("n", "n must be at least 1, got %d.", req.N)
	}
	if req.MaxTokens < 0 {
		return badRequest("max_tokens", "max_new_tokens must be at least 0, got %d.", req.MaxTokens)
	}
	if req.Limited && req.MaxTokens == 0 {
		req.MaxTokens = 1 // the simulator's shortest answer
	}
	if req.Rank >= g.e.cfg.Ranks || req.Rank < -1 {
		return badRequest("routed_dp_rank", "routed_dp_rank=%d is out of range [0, %d).", req.Rank, g.e.cfg.Ranks)
	}
	for _, item := range req.Ext.(*sglangRequest).items {
		if g.inFlight(item.rid) {
			g.e.stats.duplicateIDs.Add(1)
			return g.duplicateID(item.rid)
		}
	}
	for _, prompt := range req.Prompts {
		if longest := g.e.maxModelLen(); len(prompt) >= longest {
			return badRequest("", "The input (%d tokens) is longer than the model's context length (%d tokens).", len(prompt), longest)
		}
	}
	return nil
}

// parseGenerate reads the fields of POST /generate.
func parseGenerate(h http.Header, f fields) (*request, bool, *fieldError) {
	req := &request{Route: routeGenerate, Created: time.Now().Unix(), Fields: f, Header: h, Rank: -1}
	p := fieldReader{f: f}
	req.Stream = p.boolean("stream")
	req.CacheSalt = p.str("cache_salt", "")
	sampling := p.object("sampling_params")
	sp := fieldReader{f: sampling}
	req.N = int(sp.integer("n", 1))
	req.Limited, req.MaxTokens = true, int(sp.integer("max_new_tokens", 128))
	req.MinTokens = int(sp.integer("min_new_tokens", 0))
	req.IgnoreEOS = sp.boolean("ignore_eos")
	req.Seed = uint64(sp.integer("sampling_seed", 0))
	if p.keep(sp.err); p.err == nil {
		req.Stop, p.err = parseStop(sampling)
	}
	if p.err == nil {
		req.StopTokenIDs, p.err = parseTokenIDs(sampling, "stop_token_ids")
	}
	prompt := f["text"]
	if !f.has("text") {
		prompt = f["input_ids"]
	}
	if p.err == nil && !f.has("text") && !f.has("input_ids") {
		prompt, p.err = embedded(f)
	}
	if p.err == nil {
		req.Prompts, p.err = parsePrompt(fields{"prompt": prompt})
	}
	if p.err != nil {
		return nil, false, p.err
	}
	return req, req.N > 1 || batchPrompt(prompt), nil
}

// embedded returns the token ids that stand for input_embeds, one for each
// vector. A list of vectors is one prompt, a list of such lists a batch.
func embedded(f fields) (json.RawMessage, *fieldError) {
	if !f.has("input_embeds") {
		return nil, &fieldError{"text", "value_error", "Either text, input_ids or input_embeds should be provided."}
	}
	idsOf := func(vectors [][]float64) []token {
		ids := make([]token, len(vectors))
		for i, v := range vectors {
			for _, x := range v {
				bits := math.Float64bits(x)
				ids[i] = (ids[i]*31 + token(bits>>48^bits>>24^bits)) & 0xff
			}
		}
		return ids
	}
	var one [][]float64
	var batch [][][]float64
	var ids any
	switch {
	case json.Unmarshal(f["input_embeds"], &one) == nil:
		ids = idsOf(one)
	case json.Unmarshal(f["input_embeds"], &batch) == nil:
		lists := make([][]token, len(batch))
		for i := range batch {
			lists[i] = idsOf(batch[i])
		}
		ids = lists
	default:
		return nil, &fieldError{"input_embeds", "list_type", "Input should be a valid list"}
	}
	prompt, _ := json.Marshal(ids)
	return prompt, nil
}

// listOrOne reads a field that is one value or, for a batch, a list with one
// value for each prompt; nil for null. one reports a single value.
func listOrOne(f fields, name string) (list []json.RawMessage, one bool, err *fieldError) {
	if !f.has(name) {
		return nil, false, nil
	}
	if bytes.HasPrefix(bytes.TrimSpace(f[name]), []byte("[")) {
		if json.Unmarshal(f[name], &list) != nil {
			return nil, false, &fieldError{name, "list_type", "Input should be a valid list"}
		}
		return list, false, nil
	}
	return []json.RawMessage{f[name]}, true, nil
}

// parseItems distributes rid and the bootstrap fields over the sequences of a
// request. As in _normalize_batch_and_arguments, one host or port is repeated,
// one room counts up, and one rid gets the suffixes _0, _1…. As in
// _handle_batch_request, the samples of n > 1 are copies of their prompt's
// first sample, with random rids but the same room: on a PD engine they wait
// for each other's KV.
func parseItems(f fields, prompts, n int, batch bool) ([]sglangItem, *fieldError) {
	if n < 1 || prompts < 1 {
		return []sglangItem{{}}, nil // check rejects it
	}
	items := make([]sglangItem, prompts*n)
	p := fieldReader{f: f}
	prefillRank := int(p.integer("disagg_prefill_dp_rank", -1))
	if p.err != nil {
		return nil, p.err
	}
	for _, name := range []string{"rid", "bootstrap_host", "bootstrap_port", "bootstrap_room"} {
		list, one, err := listOrOne(f, name)
		if err == nil && !one && list != nil && (!batch || len(list) < prompts || name == "rid" && len(list) != prompts) {
			err = &fieldError{name, "value_error", "The list's length does not match the batch size"}
		}
		if err != nil {
			return nil, err
		}
		for sample := range n {
			for prompt := range prompts {
				item := &items[prompt*n+sample]
				raw := json.RawMessage(nil)
				switch {
				case one:
					raw = list[0]
				case list != nil:
					raw = list[prompt]
				}
				if err := item.set(name, raw, prompt, one && batch, n > 1); err != nil {
					return nil, err
				}
				item.prefillRank = prefillRank
			}
		}
	}
	return items, nil
}

// set reads one field of an item. counted: a single value stands for the batch; at is the
// item's position in the batch.
func (item *sglangItem) set(name string, raw json.RawMessage, at int, counted, samples bool) *fieldError {
	null := raw == nil || string(raw) == "null"
	f := fields{name: raw}
	var err *fieldError
	switch name {
	case "rid":
		switch {
		case null || samples:
			item.rid = strings.ReplaceAll(newUUID(), "-", "")
		default:
			if item.rid, err = f.str(name, ""); err == nil && counted {
				item.rid += "_" + strconv.Itoa(at)
			}
		}
	case "bootstrap_host":
		if !null {
			item.host, err = f.str(name, "")
		}
	case "bootstrap_port":
		if !null {
			var port int64
			port, err = f.integer(name, 0)
			item.port = int(port)
		}
	case "bootstrap_room":
		if item.hasRoom = !null; item.hasRoom {
			item.room, err = f.integer(name, 0)
			if counted {
				item.room += int64(at)
			}
		}
	}
	return err
}

// parseRank reads the requested rank of this engine: routed_dp_rank, its old
// name data_parallel_rank, or on the OpenAI routes the header, which has
// priority.
func (g *sglang) parseRank(route string, req *request) *fieldError {
	p := fieldReader{f: req.Fields}
	rank := p.integer("data_parallel_rank", int64(req.Rank))
	req.Rank = int(p.integer("routed_dp_rank", rank))
	if p.err != nil {
		return p.err
	}
	name := "X-Data-Parallel-Rank"
	text := ""
	if route != routeGenerate {
		text = req.Header.Get(name)
	}
	if g.cfg.HeaderOverrides && route != routeCompletions && req.Header.Get("X-Override-Routed-Dp-Rank") != "" {
		name = "X-Override-Routed-Dp-Rank"
		text = req.Header.Get(name)
	}
	if text == "" {
		return nil
	}
	v, err := strconv.Atoi(text)
	if err != nil {
		return &fieldError{name, "int_parsing", "Invalid header value: must be an integer"}
	}
	req.Rank = v
	return nil
}

// overrideItems applies the x-override-* headers
// (entrypoints/request_headers.py). They hold single values, so a batch is
// rejected.
func overrideItems(h http.Header, req *request, items []sglangItem) *fieldError {
	for header, name := range map[string]string{
		"X-Override-Rid": "rid", "X-Override-Bootstrap-Host": "bootstrap_host",
		"X-Override-Bootstrap-Port": "bootstrap_port", "X-Override-Bootstrap-Room": "bootstrap_room",
		"X-Override-Disagg-Prefill-Dp-Rank": "disagg_prefill_dp_rank",
	} {
		text := h.Get(header)
		if text == "" {
			continue
		}
		if len(items) > 1 {
			return &fieldError{header, "value_error", "Header overrides are not supported for batch requests"}
		}
		raw, _ := json.Marshal(text)
		if name == "disagg_prefill_dp_rank" {
			v, err := fields{header: raw}.integer(header, -1)
			if err != nil {
				return err
			}
			items[0].prefillRank = int(v)
			continue
		}
		if err := items[0].set(name, raw, 0, false, false); err != nil {
			return &fieldError{header, err.Kind, err.Message}
		}
	}
	return nil
}
