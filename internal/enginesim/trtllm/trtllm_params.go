package enginesim

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"reflect"
	"slices"
	"strings"
)

// Request types of disaggregated_params.
const (
	typeContext    = "context_only"
	typeGeneration = "generation_only"
	typeBoth       = "context_and_generation"
)

// Schedule styles of disaggregated_params.
const (
	contextFirst    = 0
	generationFirst = 1
)

// Ids below firstGlobalID belong to the worker itself; orchestrators mint
// disagg_request_id in [firstGlobalID, 2^63-1).
const (
	firstGlobalID = int64(1) << 40
	endGlobalIDs  = int64(1<<63 - 1)
)

// trtParams is a request's disaggregated_params.
type trtParams struct {
	kind      string
	disaggID  *int64
	ctxID     *int64
	first     []token
	state     *trtState // of encoded_opaque_state
	endpoint  string
	style     int
	usage     *trtUsage
	base64IDs bool
	raw       fields
}

// endpointScheme begins a ctx_info_endpoint.
const endpointScheme = "tcp://"

// source returns the address of the KV, and its engine if it is known: from the
// context's answer, or from the engine that is at the endpoint.
func (p *trtParams) source() (addr, engine string) {
	if p.state != nil {
		return p.state.Addr, p.state.Engine
	}
	return strings.TrimPrefix(p.endpoint, endpointScheme), ""
}

// trtUsage is ctx_usage.
type trtUsage struct{ prompt, cached int }

// key returns the transfer's id: the disagg id if there is one.
func (p *trtParams) key() *int64 {
	if p.disaggID != nil {
		return p.disaggID
	}
	return p.ctxID
}

// trtState is the content of encoded_opaque_state: the address of a context
// worker's KV. Orchestrators forward it byte for byte.
type trtState struct {
	Engine string `json:"engine"`
	Addr   string `json:"addr"`
	Rank   int    `json:"rank"`
	// Request is the transfer's id; 0 in the state that /server_info publishes.
	Request int64 `json:"request,omitempty"`
}

// encode packs the state after a checksum.
func (st trtState) encode() string {
	body, _ := json.Marshal(st)
	return base64.StdEncoding.EncodeToString(append(binary.LittleEndian.AppendUint32(nil, crc32.ChecksumIEEE(body)), body...))
}

func decodeTRTState(text string) (*trtState, error) {
	raw, err := base64.StdEncoding.Strict().DecodeString(text)
	if err != nil {
		return nil, fmt.Errorf("decode opaque state: %w", err)
	}
	if len(raw) < 4 || crc32.ChecksumIEEE(raw[4:]) != binary.LittleEndian.Uint32(raw) {
		return nil, fmt.Errorf("decode opaque state: corrupted")
	}
	var st trtState
	if err := json.Unmarshal(raw[4:], &st); err != nil {
		return nil, fmt.Errorf("decode opaque state: %w", err)
	}
	return &st, nil
}

// Fields of disaggregated_params that this worker's build has in addition to
// the published models. A context returns them, and a generation requires them
// unchanged. Orchestrators that copy only known fields lose them.
const (
	futureEpoch  = "kv_epoch"
	futureLayout = "kv_layout"
)

// futureFields returns their values for a transfer: an integer beyond 2^53 and
// a nested object.
func futureFields(id int64) (epoch int64, layout json.RawMessage) {
	h := mix(uint64(id))
	epoch = int64(h>>1 | 1<<61 | 1)
	layout = fmt.Appendf(nil, `{"page":{"tokens":16,"heads":[%d,%d]},"dtype":"sim\u00e9/8","scale":1.0,"none":null}`, h%64, h%61)
	return epoch, layout
}

// checkFuture rejects params whose future fields differ from those of the context.
func checkFuture(f fields, id int64) *apiError {
	epoch, layout := futureFields(id)
	for name, want := range map[string]string{futureEpoch: fmt.Sprint(epoch), futureLayout: string(layout)} {
		if !f.has(name) || !sameJSON(f[name], json.RawMessage(want)) {
			return trtBadRequest("disaggregated_params.%s is not what the context worker returned", name)
		}
	}
	return nil
}

// sameJSON compares values; numbers must have the same text.
func sameJSON(a, b json.RawMessage) bool {
	read := func(raw json.RawMessage) (v any) {
		dec := json.NewDecoder(bytes.NewReader(raw))
		dec.UseNumber()
		if dec.Decode(&v) != nil {
			return nil
		}
		return v
	}
	return reflect.DeepEqual(read(a), read(b))
}

// trtParamFields are the fields of disaggregated_params in each wire generation
// (DisaggregatedParams in serve/openai_protocol.py; its base model forbids
// others).
func trtParamFields(wire int) []string {
	list := []string{"request_type", "first_gen_tokens", "ctx_request_id", "encoded_opaque_state", "draft_tokens", futureEpoch, futureLayout}
	if wire >= TRTLLMWireG2 {
		list = append(list, "disagg_request_id", "first_gen_log_probs", "first_gen_logits", "ctx_dp_rank", "ctx_info_endpoint",
			"schedule_style", "ctx_usage", "return_prompt_token_ids_b64")
	}
	if wire >= TRTLLMWireG3 {
		return append(list, "resolved_thinking")
	}
	return append(list, "conversation_id")
}

// parseTRTParams reads disaggregated_params; nil when the request has none. A
// fieldError is an error of pydantic, an apiError an error of the worker's
// later checks.
func parseTRTParams(wire int, body fields) (*trtParams, *fieldError, *apiError) {
	f, ferr := body.object("disaggregated_params")
	if ferr != nil || f == nil {
		return nil, ferr, nil
	}
	if name := f.unknown(trtParamFields(wire)); name != "" {
		return nil, forbidden("disaggregated_params." + name), nil
	}
	if !f.has("request_type") {
		return nil, &fieldError{"disaggregated_params.request_type", "missing", "Field required"}, nil
	}
	r := fieldReader{f: f}
	p := &trtParams{raw: f, kind: strings.ToLower(r.str("request_type", ""))}
	p.disaggID, p.ctxID = r.optionalID("disagg_request_id"), r.optionalID("ctx_request_id")
	p.endpoint = r.str("ctx_info_endpoint", "")
	p.style = int(r.integer("schedule_style", contextFirst))
	p.base64IDs = r.boolean("return_prompt_token_ids_b64")
	state := r.str("encoded_opaque_state", "")
	r.str("conversation_id", "")
	r.integer("ctx_dp_rank", 0)
	r.boolean("resolved_thinking")
	var err *fieldError
	if p.first, err = parseTokenIDs(f, "first_gen_tokens"); err != nil {
		r.keep(err)
	}
	if _, err = parseTokenIDs(f, "draft_tokens"); err != nil {
		r.keep(err)
	}
	if p.usage, err = parseTRTUsage(f); err != nil {
		r.keep(err)
	}
	if r.err == nil && p.style != contextFirst && p.style != generationFirst {
		r.keep(&fieldError{"schedule_style", "enum", "Input should be 0 or 1"})
	}
	if r.err != nil {
		return nil, &fieldError{"disaggregated_params." + r.err.Field, r.err.Kind, r.err.Message}, nil
	}
	return p, nil, p.complete(state, f.has("encoded_opaque_state"))
}

// complete does the worker's checks of params that pydantic has accepted.
func (p *trtParams) complete(state string, hasState bool) *apiError {
	if !slices.Contains([]string{typeContext, typeGeneration, typeBoth}, p.kind) {
		return trtBadRequest("Unknown request type: %s. Must be context_only, generation_only or context_and_generation", p.kind)
	}
	for _, t := range p.first {
		if !t.valid() {
			return trtBadRequest("first_gen_tokens: token id %d is out of vocabulary", t)
		}
	}
	if hasState {
		var err error
		if p.state, err = decodeTRTState(state); err != nil {
			return trtBadRequest("%s", err)
		}
	}
	return nil
}

// parseTRTUsage reads ctx_usage, a UsageInfo.
func parseTRTUsage(f fields) (*trtUsage, *fieldError) {
	o, err := f.object("ctx_usage")
	if err != nil || o == nil {
		return nil, err
	}
	if name := o.unknown([]string{"prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details"}); name != "" {
		return nil, forbidden("ctx_usage." + name)
	}
	r := fieldReader{f: o}
	u := &trtUsage{prompt: int(r.integer("prompt_tokens", 0))}
	r.integer("total_tokens", 0)
	r.integer("completion_tokens", 0)
	details := fieldReader{f: r.object("prompt_tokens_details")}
	if name := details.f.unknown([]string{"cached_tokens"}); name != "" {
		return nil, forbidden("ctx_usage.prompt_tokens_details." + name)
	}
	u.cached = int(details.integer("cached_tokens", 0))
	r.keep(details.err)
	return u, r.err
}

// forbidden is pydantic's error for a field that a model does not have.
func forbidden(name string) *fieldError {
	return &fieldError{name, "extra_forbidden", "Extra inputs are not permitted"}
}
