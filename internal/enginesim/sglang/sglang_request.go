package sglang

import (
	"bytes"
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// SGLangRequest is SGLang's state of a request.
type SGLangRequest struct {
	// batch: a native answer is a list.
	batch bool
	// Items are the sequences' own fields, in choice order.
	Items []sglangItem
	// logprobs are the requested log probabilities of the sequences of /generate, in
	// choice order.
	logprobs []sglangLogprobs
	// refusal is the failure of a stream whose head the engine sends before it checks the
	// request.
	refusal *core.APIError
	// begun: the stream of /v1/messages has its first event.
	begun bool
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
func sglangFieldError(route string, err *core.FieldError) *core.APIError {
	kind := "Bad Request"
	if route == RouteGenerate {
		kind = nativeError
	}
	return &core.APIError{Status: http.StatusBadRequest, Type: kind, Message: "1 validation errors:\n  body." + err.Field + ": " + err.Message, Param: err.Field}
}

func (g *SGLang) Parse(route string, h http.Header, body []byte) (*core.Request, *core.APIError) {
	req, refusal := g.parse(route, h, body)
	if refusal != nil {
		refusal.Body = typedError(route, refusal)
	}
	return req, refusal
}

func (g *SGLang) parse(route string, h http.Header, body []byte) (*core.Request, *core.APIError) {
	f, ferr := core.DecodeFields(body)
	var req *core.Request
	batch := false
	switch {
	case ferr != nil:
	case route == RouteGenerate:
		req, batch, ferr = parseGenerate(h, f)
	case route == core.RouteResponses:
		var refusal *core.APIError
		if req, refusal, ferr = g.parseResponses(h, f); refusal != nil {
			return nil, refusal
		}
	case route == core.RouteMessages:
		req, ferr = g.parseMessages(h, f)
	default:
		req, ferr = core.ParseOpenAI(route, h, f)
		if ferr == nil && req.Chat && f.Has("input_ids") {
			var ids []core.Token
			ids, ferr = core.ParseTokenIDs(f, "input_ids")
			req.Prompts = [][]core.Token{ids}
		}
		if ferr == nil {
			ownOutput(req, f)
		}
		batch = ferr == nil && (req.N > 1 || !req.Chat && core.BatchPrompt(f["prompt"]))
	}
	if ferr != nil {
		return nil, sglangFieldError(route, ferr)
	}
	items, ferr := parseItems(req.Fields, len(req.Prompts), req.N, batch)
	if ferr == nil && g.overrides(route) {
		ferr = overrideItems(h, req, items)
	}
	if ferr == nil {
		ferr = g.parseRank(route, req)
	}
	if ferr != nil {
		return nil, sglangFieldError(route, ferr)
	}
	ext := &SGLangRequest{batch: batch, Items: items}
	if route == RouteGenerate && req.N > 0 && req.N <= core.MaxSamples {
		if ext.logprobs, ferr = parseLogprobs(f, len(req.Prompts), req.N); ferr != nil {
			return nil, sglangFieldError(route, ferr)
		}
	}
	req.Ext = ext
	req.ID = items[0].rid
	if g.mode == modeDecode {
		// Decode has a chunk cache: other requests reuse none of it.
		req.CacheSalt = "chunk cache " + core.NewUUID()
	}
	refusal := g.check(req)
	switch {
	case refusal == nil:
	case route == core.RouteResponses && req.Stream:
		ext.refusal = refusal
	case typed(route):
		return nil, typedFailure(req, refusal)
	case route == RouteGenerate:
		refusal.Type = nativeError
		fallthrough
	default:
		return nil, refusal
	}
	return req, nil
}

// overrides reports whether header lines replace fields of a route's body. /v1/messages is
// served as a chat (entrypoints/anthropic/serving.py, _convert_to_internal_request).
func (g *SGLang) overrides(route string) bool {
	return g.cfg.HeaderOverrides && route != core.RouteCompletions && route != core.RouteResponses
}

// ownOutput notes sampling parameters whose effect depends on the output of this request alone:
// each penalty counts only the output (sampling/penaltylib), and a grammar begins at its root.
func ownOutput(req *core.Request, f core.Fields) {
	penalty, _ := f.Number("repetition_penalty", 1)
	req.OwnOutput = req.OwnOutput || penalty != 1
	for _, name := range []string{"json_schema", "regex", "ebnf", "structural_tag"} {
		req.OwnOutput = req.OwnOutput || f.Has(name)
	}
}

// checkIDs rejects a chat stream that asks for token ids, which only a whole answer has
// (entrypoints/openai/serving_chat.py, _convert_to_internal_request).
func checkIDs(req *core.Request) *core.APIError {
	if !req.Chat || !req.Stream {
		return nil
	}
	for _, name := range []string{"return_prompt_token_ids", "return_token_ids"} {
		if wanted, _ := req.Fields.Boolean(name, false); wanted {
			on := ""
			if name == "return_token_ids" {
				on = " on /v1/chat/completions"
			}
			return core.BadRequest("", "%s is not supported with streaming%s. Please set stream=false when using %s=true.", name, on, name)
		}
	}
	return nil
}

// check does the checks of the tokenizer manager.
func (g *SGLang) check(req *core.Request) *core.APIError {
	if refusal := checkIDs(req); refusal != nil {
		return refusal
	}
	if req.N < 1 {
		return core.BadRequest("n", "n must be at least 1, got %d.", req.N)
	}
	if req.MaxTokens < 0 {
		return core.BadRequest("max_tokens", "max_new_tokens must be at least 0, got %d.", req.MaxTokens)
	}
	if req.Limited && req.MaxTokens == 0 {
		req.MaxTokens = 1 // the simulator's shortest answer
	}
	if req.Rank >= g.e.Cfg.Ranks || req.Rank < -1 {
		return core.BadRequest("routed_dp_rank", "routed_dp_rank=%d is out of range [0, %d).", req.Rank, g.e.Cfg.Ranks)
	}
	for _, item := range req.Ext.(*SGLangRequest).Items {
		if g.InFlight(item.rid) {
			g.e.Stats.DuplicateIDs.Add(1)
			return g.duplicateID(item.rid)
		}
	}
	for _, prompt := range req.Prompts {
		if longest := g.e.MaxModelLen(); len(prompt) >= longest {
			return core.BadRequest("", "The input (%d tokens) is longer than the model's context length (%d tokens).", len(prompt), longest)
		}
	}
	return nil
}

// parseGenerate reads the fields of POST /generate.
func parseGenerate(h http.Header, f core.Fields) (*core.Request, bool, *core.FieldError) {
	req := &core.Request{Route: RouteGenerate, Created: time.Now().Unix(), Fields: f, Header: h, Rank: -1}
	p := core.FieldReader{F: f}
	req.Stream = p.Boolean("stream")
	req.CacheSalt = p.Str("cache_salt", "")
	sampling := p.Object("sampling_params")
	sp := core.FieldReader{F: sampling}
	req.N = int(sp.Integer("n", 1))
	req.Limited, req.MaxTokens = true, int(sp.Integer("max_new_tokens", 128))
	req.MinTokens = int(sp.Integer("min_new_tokens", 0))
	req.IgnoreEOS = sp.Boolean("ignore_eos")
	req.Seed = uint64(sp.Integer("sampling_seed", 0))
	presence, _ := sampling.Number("presence_penalty", 0)
	frequency, _ := sampling.Number("frequency_penalty", 0)
	req.OwnOutput = req.Seed != 0 || presence != 0 || frequency != 0
	ownOutput(req, sampling)
	if p.Keep(sp.Err); p.Err == nil {
		req.Stop, p.Err = core.ParseStop(sampling)
	}
	if p.Err == nil {
		req.StopTokenIDs, p.Err = core.ParseTokenIDs(sampling, "stop_token_ids")
	}
	prompt := f["text"]
	if !f.Has("text") {
		prompt = f["input_ids"]
	}
	if p.Err == nil && !f.Has("text") && !f.Has("input_ids") {
		prompt, p.Err = embedded(f)
	}
	if p.Err == nil {
		req.Prompts, p.Err = core.ParsePrompt(core.Fields{"prompt": prompt})
	}
	if p.Err != nil {
		return nil, false, p.Err
	}
	return req, req.N > 1 || core.BatchPrompt(prompt), nil
}

// embedded returns the token ids that stand for input_embeds, one for each
// vector. A list of vectors is one prompt, a list of such lists a batch.
func embedded(f core.Fields) (json.RawMessage, *core.FieldError) {
	if !f.Has("input_embeds") {
		return nil, &core.FieldError{Field: "text", Kind: "value_error", Message: "Either text, input_ids or input_embeds should be provided."}
	}
	idsOf := func(vectors [][]float64) []core.Token {
		ids := make([]core.Token, len(vectors))
		for i, v := range vectors {
			for _, x := range v {
				bits := math.Float64bits(x)
				ids[i] = (ids[i]*31 + core.Token(bits>>48^bits>>24^bits)) & 0xff
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
		lists := make([][]core.Token, len(batch))
		for i := range batch {
			lists[i] = idsOf(batch[i])
		}
		ids = lists
	default:
		return nil, &core.FieldError{Field: "input_embeds", Kind: "list_type", Message: "Input should be a valid list"}
	}
	prompt, _ := json.Marshal(ids)
	return prompt, nil
}

// listOrOne reads a field that is one value or, for a batch, a list with one
// value for each prompt; nil for null. one reports a single value.
func listOrOne(f core.Fields, name string) (list []json.RawMessage, one bool, err *core.FieldError) {
	if !f.Has(name) {
		return nil, false, nil
	}
	if bytes.HasPrefix(bytes.TrimSpace(f[name]), []byte("[")) {
		if json.Unmarshal(f[name], &list) != nil {
			return nil, false, &core.FieldError{Field: name, Kind: "list_type", Message: "Input should be a valid list"}
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
func parseItems(f core.Fields, prompts, n int, batch bool) ([]sglangItem, *core.FieldError) {
	if n < 1 || prompts < 1 {
		return []sglangItem{{}}, nil // check rejects it
	}
	items := make([]sglangItem, prompts*n)
	p := core.FieldReader{F: f}
	prefillRank := int(p.Integer("disagg_prefill_dp_rank", -1))
	if p.Err != nil {
		return nil, p.Err
	}
	for _, name := range []string{"rid", "bootstrap_host", "bootstrap_port", "bootstrap_room"} {
		list, one, err := listOrOne(f, name)
		if err == nil && !one && list != nil && (!batch || len(list) < prompts || name == "rid" && len(list) != prompts) {
			err = &core.FieldError{Field: name, Kind: "value_error", Message: "The list's length does not match the batch size"}
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
func (item *sglangItem) set(name string, raw json.RawMessage, at int, counted, samples bool) *core.FieldError {
	null := raw == nil || string(raw) == "null"
	f := core.Fields{name: raw}
	var err *core.FieldError
	switch name {
	case "rid":
		switch {
		case null || samples:
			item.rid = strings.ReplaceAll(core.NewUUID(), "-", "")
		default:
			if item.rid, err = f.Str(name, ""); err == nil && counted {
				item.rid += "_" + strconv.Itoa(at)
			}
		}
	case "bootstrap_host":
		if !null {
			item.host, err = f.Str(name, "")
		}
	case "bootstrap_port":
		if !null {
			var port int64
			port, err = f.Integer(name, 0)
			item.port = int(port)
		}
	case "bootstrap_room":
		if item.hasRoom = !null; item.hasRoom {
			item.room, err = f.Integer(name, 0)
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
func (g *SGLang) parseRank(route string, req *core.Request) *core.FieldError {
	p := core.FieldReader{F: req.Fields}
	rank := p.Integer("data_parallel_rank", int64(req.Rank))
	req.Rank = int(p.Integer("routed_dp_rank", rank))
	if p.Err != nil {
		return p.Err
	}
	name := "X-Data-Parallel-Rank"
	text := ""
	if route != RouteGenerate {
		text = req.Header.Get(name)
	}
	if g.overrides(route) && req.Header.Get("X-Override-Routed-Dp-Rank") != "" {
		name = "X-Override-Routed-Dp-Rank"
		text = req.Header.Get(name)
	}
	if text == "" {
		return nil
	}
	v, err := strconv.Atoi(text)
	if err != nil {
		return &core.FieldError{Field: name, Kind: "int_parsing", Message: "Invalid header value: must be an integer"}
	}
	req.Rank = v
	return nil
}

// overrideItems applies the x-override-* headers
// (entrypoints/request_headers.py). They hold single values, so a batch is
// rejected.
func overrideItems(h http.Header, req *core.Request, items []sglangItem) *core.FieldError {
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
			return &core.FieldError{Field: header, Kind: "value_error", Message: "Header overrides are not supported for batch requests"}
		}
		raw, _ := json.Marshal(text)
		if name == "disagg_prefill_dp_rank" {
			v, err := core.Fields{header: raw}.Integer(header, -1)
			if err != nil {
				return err
			}
			items[0].prefillRank = int(v)
			continue
		}
		if err := items[0].set(name, raw, 0, false, false); err != nil {
			return &core.FieldError{Field: header, Kind: err.Kind, Message: err.Message}
		}
	}
	return nil
}
