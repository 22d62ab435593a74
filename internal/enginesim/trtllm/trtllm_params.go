package trtllm

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

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// Request types of disaggregated_params.
const (
	typeContext    = "context_only"
	TypeGeneration = "generation_only"
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

// TRTParams is a request's disaggregated_params.
type TRTParams struct {
	kind      string
	disaggID  *int64
	ctxID     *int64
	first     []core.Token
	State     *TRTState // of encoded_opaque_state
	endpoint  string
	style     int
	usage     *trtUsage
	base64IDs bool
	Raw       core.Fields
}

// endpointScheme begins a ctx_info_endpoint.
const endpointScheme = "tcp://"

// source returns the address of the KV, and its engine if it is known: from the
// context's answer, or from the engine that is at the endpoint.
func (p *TRTParams) source() (addr, engine string) {
	if p.State != nil {
		return p.State.Addr, p.State.Engine
	}
	return strings.TrimPrefix(p.endpoint, endpointScheme), ""
}

// trtUsage is ctx_usage.
type trtUsage struct{ prompt, cached int }

// Key returns the transfer's id: the disagg id if there is one.
func (p *TRTParams) Key() *int64 {
	if p.disaggID != nil {
		return p.disaggID
	}
	return p.ctxID
}

// TRTState is the content of encoded_opaque_state: the address of a context
// worker's KV. Orchestrators forward it byte for byte.
type TRTState struct {
	Engine string `json:"engine"`
	Addr   string `json:"addr"`
	Rank   int    `json:"rank"`
	// Request is the transfer's id; 0 in the state that /server_info publishes.
	Request int64 `json:"request,omitempty"`
}

// Encode packs the state after a checksum.
func (st TRTState) Encode() string {
	body, _ := json.Marshal(st)
	return base64.StdEncoding.EncodeToString(append(binary.LittleEndian.AppendUint32(nil, crc32.ChecksumIEEE(body)), body...))
}

func DecodeTRTState(text string) (*TRTState, error) {
	raw, err := base64.StdEncoding.Strict().DecodeString(text)
	if err != nil {
		return nil, fmt.Errorf("decode opaque state: %w", err)
	}
	if len(raw) < 4 || crc32.ChecksumIEEE(raw[4:]) != binary.LittleEndian.Uint32(raw) {
		return nil, fmt.Errorf("decode opaque state: corrupted")
	}
	var st TRTState
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

// FutureFields returns their values for a transfer: an integer beyond 2^53 and
// a nested object.
func FutureFields(id int64) (epoch int64, layout json.RawMessage) {
	h := core.Mix(uint64(id))
	epoch = int64(h>>1 | 1<<61 | 1)
	layout = fmt.Appendf(nil, `{"page":{"tokens":16,"heads":[%d,%d]},"dtype":"sim\u00e9/8","scale":1.0,"none":null}`, h%64, h%61)
	return epoch, layout
}

// checkFuture rejects params whose future fields differ from those of the context.
func checkFuture(f core.Fields, id int64) *core.APIError {
	epoch, layout := FutureFields(id)
	for name, want := range map[string]string{futureEpoch: fmt.Sprint(epoch), futureLayout: string(layout)} {
		if !f.Has(name) || !sameJSON(f[name], json.RawMessage(want)) {
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
	if wire >= core.TRTLLMWireG2 {
		list = append(list, "disagg_request_id", "first_gen_log_probs", "first_gen_logits", "ctx_dp_rank", "ctx_info_endpoint",
			"schedule_style", "ctx_usage", "return_prompt_token_ids_b64")
	}
	if wire >= core.TRTLLMWireG3 {
		return append(list, "resolved_thinking")
	}
	return append(list, "conversation_id")
}

// parseTRTParams reads disaggregated_params; nil when the request has none. A
// FieldError is an error of pydantic, an APIError an error of the worker's
// later checks.
func parseTRTParams(wire int, body core.Fields) (*TRTParams, *core.FieldError, *core.APIError) {
	f, ferr := body.Object("disaggregated_params")
	if ferr != nil || f == nil {
		return nil, ferr, nil
	}
	if name := f.Unknown(trtParamFields(wire)); name != "" {
		return nil, forbidden("disaggregated_params." + name), nil
	}
	if !f.Has("request_type") {
		return nil, &core.FieldError{Field: "disaggregated_params.request_type", Kind: "missing", Message: "Field required"}, nil
	}
	r := core.FieldReader{F: f}
	p := &TRTParams{Raw: f, kind: strings.ToLower(r.Str("request_type", ""))}
	p.disaggID, p.ctxID = r.OptionalID("disagg_request_id"), r.OptionalID("ctx_request_id")
	p.endpoint = r.Str("ctx_info_endpoint", "")
	p.style = int(r.Integer("schedule_style", contextFirst))
	p.base64IDs = r.Boolean("return_prompt_token_ids_b64")
	state := r.Str("encoded_opaque_state", "")
	r.Str("conversation_id", "")
	r.Integer("ctx_dp_rank", 0)
	r.Boolean("resolved_thinking")
	var err *core.FieldError
	if p.first, err = core.ParseTokenIDs(f, "first_gen_tokens"); err != nil {
		r.Keep(err)
	}
	if _, err = core.ParseTokenIDs(f, "draft_tokens"); err != nil {
		r.Keep(err)
	}
	if p.usage, err = parseTRTUsage(f); err != nil {
		r.Keep(err)
	}
	if r.Err == nil && p.style != contextFirst && p.style != generationFirst {
		r.Keep(&core.FieldError{Field: "schedule_style", Kind: "enum", Message: "Input should be 0 or 1"})
	}
	if r.Err != nil {
		return nil, &core.FieldError{Field: "disaggregated_params." + r.Err.Field, Kind: r.Err.Kind, Message: r.Err.Message}, nil
	}
	return p, nil, p.complete(state, f.Has("encoded_opaque_state"))
}

// complete does the worker's checks of params that pydantic has accepted.
func (p *TRTParams) complete(state string, hasState bool) *core.APIError {
	if !slices.Contains([]string{typeContext, TypeGeneration, typeBoth}, p.kind) {
		return trtBadRequest("Unknown request type: %s. Must be context_only, generation_only or context_and_generation", p.kind)
	}
	for _, t := range p.first {
		if !t.Valid() {
			return trtBadRequest("first_gen_tokens: token id %d is out of vocabulary", t)
		}
	}
	if hasState {
		var err error
		if p.State, err = DecodeTRTState(state); err != nil {
			return trtBadRequest("%s", err)
		}
	}
	return nil
}

// parseTRTUsage reads ctx_usage, a UsageInfo.
func parseTRTUsage(f core.Fields) (*trtUsage, *core.FieldError) {
	o, err := f.Object("ctx_usage")
	if err != nil || o == nil {
		return nil, err
	}
	if name := o.Unknown([]string{"prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details"}); name != "" {
		return nil, forbidden("ctx_usage." + name)
	}
	r := core.FieldReader{F: o}
	u := &trtUsage{prompt: int(r.Integer("prompt_tokens", 0))}
	r.Integer("total_tokens", 0)
	r.Integer("completion_tokens", 0)
	details := core.FieldReader{F: r.Object("prompt_tokens_details")}
	if name := details.F.Unknown([]string{"cached_tokens"}); name != "" {
		return nil, forbidden("ctx_usage.prompt_tokens_details." + name)
	}
	u.cached = int(details.Integer("cached_tokens", 0))
	r.Keep(details.Err)
	return u, r.Err
}

// forbidden is pydantic's error for a field that a model does not have.
func forbidden(name string) *core.FieldError {
	return &core.FieldError{Field: name, Kind: "extra_forbidden", Message: "Extra inputs are not permitted"}
}
