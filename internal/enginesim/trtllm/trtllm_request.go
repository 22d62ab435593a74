package trtllm

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// TRTRequest is TensorRT-LLM's state of a request.
type TRTRequest struct {
	Params *TRTParams // nil: a plain request
	wire   int        // the worker's wire generation
	// tokenIDs: the prompt came as token ids.
	tokenIDs bool
	times    trtTimes
}

// Is reports whether the request is a leg of the named type.
func (q *TRTRequest) Is(kind string) bool { return q.Params != nil && q.Params.kind == kind }

// validationError marks errors of the request models, which have a special form.
const validationError = "validation"

func trtFieldError(err *core.FieldError) *core.APIError {
	at := "'body'"
	for part := range strings.SplitSeq(err.Field, ".") {
		if _, number := strconv.Atoi(part); number != nil {
			part = "'" + part + "'"
		}
		at += ", " + part
	}
	return &core.APIError{Status: http.StatusBadRequest, Type: validationError, Param: err.Field,
		Message: fmt.Sprintf("[{'type': '%s', 'loc': (%s), 'msg': '%s'}]", err.Kind, at, err.Message)}
}

// trtBadRequest is the worker's answer to a request that its models accept but
// that it cannot run (create_error_response in serve/openai_server.py).
func trtBadRequest(format string, args ...any) *core.APIError {
	return core.BadRequest("", format, args...)
}

// Top-level fields of the request models in serve/openai_protocol.py.
var (
	trtSharedFields = strings.Fields(`model frequency_penalty logit_bias logprobs max_tokens n presence_penalty
		response_format seed stop stream stream_options temperature top_p user lora_request prompt_ignore_length
		best_of use_beam_search top_k top_p_min min_p repetition_penalty length_penalty early_stopping stop_token_ids
		include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
		truncate_prompt_tokens thinking_token_budget echo add_special_tokens disaggregated_params priority`)
	trtCompletionFields = strings.Fields(`prompt suffix return_context_logits detokenize`)
	trtChatFields       = strings.Fields(`messages prompt_token_ids top_logprobs max_completion_tokens tools tool_choice
		parallel_tool_calls reasoning_effort thinking add_generation_prompt documents chat_template chat_template_kwargs
		injected_chat_template_kwargs media_io_kwargs cache_salt agent_hierarchy mm_processor_kwargs`)
)

// trtFields are the fields that a route's request model has.
func trtFields(wire int, route string) []string {
	if route == core.RouteResponses {
		return trtResponseFields
	}
	chat := route == core.RouteChat
	list := append([]string{}, trtSharedFields...)
	if chat {
		list = append(list, trtChatFields...)
	} else {
		list = append(list, trtCompletionFields...)
	}
	if wire >= core.TRTLLMWireG2 {
		list = append(list, "conversation_params")
		if chat {
			list = append(list, "prompt_token_ids_b64")
		}
	}
	return list
}

func (t *TRTLLM) Parse(route string, h http.Header, body []byte) (*core.Request, *core.APIError) {
	f, ferr := core.DecodeFields(body)
	if ferr != nil {
		return nil, trtFieldError(ferr)
	}
	if name := f.Unknown(trtFields(t.cfg.Wire, route)); name != "" {
		return nil, trtFieldError(forbidden(name))
	}
	if ferr = t.checkFields(f); ferr != nil {
		return nil, trtFieldError(ferr)
	}
	var req *core.Request
	if route == core.RouteResponses {
		req, ferr = core.ParseResponses(h, f)
	} else {
		req, ferr = core.ParseOpenAI(route, h, f)
	}
	if ferr != nil {
		return nil, trtFieldError(ferr)
	}
	params, ferr, refusal := parseTRTParams(t.cfg.Wire, f)
	q := &TRTRequest{Params: params, wire: t.cfg.Wire}
	req.Ext = q
	if ferr == nil && refusal == nil {
		ferr = t.completeRequest(req, q)
	}
	if ferr != nil {
		return nil, trtFieldError(ferr)
	}
	if refusal == nil {
		refusal = t.check(req, q)
	}
	if refusal != nil {
		return nil, refusal
	}
	return req, nil
}

// checkFields does the checks of the models that ParseOpenAI does not do.
func (t *TRTLLM) checkFields(f core.Fields) *core.FieldError {
	if !f.Has("model") {
		return &core.FieldError{Field: "model", Kind: "missing", Message: "Field required"}
	}
	if f.Has("suffix") && string(f["suffix"]) != `""` {
		return &core.FieldError{Field: "suffix", Kind: "value_error", Message: "Value error, suffix is not supported"}
	}
	r := core.FieldReader{F: f}
	options := r.Object("stream_options")
	if r.Err == nil && len(options) > 0 && !r.Boolean("stream") {
		return &core.FieldError{Field: "stream_options", Kind: "value_error", Message: "Value error, Stream options can only be defined when stream is true."}
	}
	if name := options.Unknown([]string{"include_usage", "continuous_usage_stats"}); name != "" {
		return forbidden("stream_options." + name)
	}
	conversation := r.Object("conversation_params")
	if r.Err != nil || conversation == nil {
		return r.Err
	}
	if name := conversation.Unknown([]string{"conversation_id", "subagent_affinity_id"}); name != "" {
		return forbidden("conversation_params." + name)
	}
	if id, err := conversation.Str("conversation_id", ""); err != nil || strings.TrimSpace(id) == "" {
		return &core.FieldError{Field: "conversation_params.conversation_id", Kind: "value_error", Message: "Value error, conversation_id must be non-empty"}
	}
	return nil
}

// completeRequest sets the defaults that differ from the other engines': no
// token limit unless the request has one, usage in streams with stream_options
// unless it is switched off, and chat prompts as token ids.
func (t *TRTLLM) completeRequest(req *core.Request, q *TRTRequest) *core.FieldError {
	if req.Route == core.RouteResponses {
		completeResponse(req)
		return nil
	}
	f := req.Fields
	req.ID = strings.ReplaceAll(core.NewUUID(), "-", "")
	if !f.Has("max_tokens") && !f.Has("max_completion_tokens") {
		req.Limited, req.MaxTokens = false, 0
	}
	if options, _ := f.Object("stream_options"); options != nil {
		if _, ok := options["include_usage"]; !ok {
			req.IncludeUsage = true
		}
	}
	if !req.Chat {
		q.tokenIDs = !core.BatchPrompt(f["prompt"]) && strings.HasPrefix(strings.TrimSpace(string(f["prompt"])), "[")
		return nil
	}
	ids, err := core.ParseTokenIDs(f, "prompt_token_ids")
	if err == nil && f.Has("prompt_token_ids_b64") {
		ids, err = ParsePackedIDs(f, "prompt_token_ids_b64")
	}
	if ids != nil {
		q.tokenIDs, req.Prompts = true, [][]core.Token{ids}
	}
	return err
}

// ParsePackedIDs reads token ids from a base64 buffer of 32-bit integers.
func ParsePackedIDs(f core.Fields, name string) ([]core.Token, *core.FieldError) {
	text, ferr := f.Str(name, "")
	if ferr != nil {
		return nil, ferr
	}
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil || len(raw)%4 != 0 {
		return nil, &core.FieldError{Field: name, Kind: "value_error", Message: "Value error, not a base64 buffer of int32"}
	}
	ids := make([]core.Token, 0, len(raw)/4)
	for ; len(raw) > 0; raw = raw[4:] {
		ids = append(ids, core.Token(int32(binary.LittleEndian.Uint32(raw))))
	}
	return ids, nil
}

// PackIDs is the inverse of ParsePackedIDs.
func PackIDs(ids []core.Token) string {
	var raw []byte
	for _, id := range ids {
		raw = binary.LittleEndian.AppendUint32(raw, uint32(id))
	}
	return base64.StdEncoding.EncodeToString(raw)
}

// check does the worker's checks before it starts an answer.
func (t *TRTLLM) check(req *core.Request, q *TRTRequest) *core.APIError {
	switch {
	case req.N < 1:
		return trtBadRequest("n must be at least 1, got %d", req.N)
	case req.Limited && req.MaxTokens < 1:
		return trtBadRequest("max_tokens must be greater than 0, got %d", req.MaxTokens)
	}
	for _, prompt := range req.Prompts {
		if longest := t.e.MaxModelLen(); len(prompt)+max(1, req.MaxTokens)-1 > longest {
			return trtBadRequest("The sum of prompt length (%d) and max_tokens (%d) should not exceed max_num_tokens (%d)",
				len(prompt), req.MaxTokens, longest)
		}
	}
	if q.Params == nil || q.Params.kind == typeBoth {
		return nil
	}
	if refusal := t.CheckAuth(req, q.Params); refusal != nil {
		return refusal
	}
	if len(req.Prompts) != 1 || req.N != 1 {
		return trtBadRequest("Disaggregated requests take one prompt and n = 1")
	}
	if id := q.Params.disaggID; id != nil && (*id < firstGlobalID || *id >= endGlobalIDs) {
		return trtBadRequest("disagg_request_id %d is not in [%d, %d)", *id, firstGlobalID, endGlobalIDs)
	}
	if q.Is(typeContext) {
		if req.Stream {
			return trtBadRequest("context_only requests cannot be streamed")
		}
		return nil
	}
	return t.checkGeneration(q)
}

// checkGeneration rejects a generation that cannot find its context.
func (t *TRTLLM) checkGeneration(q *TRTRequest) *core.APIError {
	p := q.Params
	switch {
	case p.Key() == nil:
		return trtBadRequest("generation_only request needs disagg_request_id or ctx_request_id")
	case p.style == generationFirst && !strings.HasPrefix(p.endpoint, endpointScheme):
		return trtBadRequest("generation_first request needs the context worker's ctx_info_endpoint")
	case p.style == generationFirst:
		return nil
	case p.State == nil:
		return trtBadRequest("generation_only request needs encoded_opaque_state")
	case len(p.first) == 0:
		return trtBadRequest("generation_only request needs first_gen_tokens")
	case !q.tokenIDs:
		return trtBadRequest("generation_only request needs the context's prompt token ids")
	}
	return checkFuture(p.Raw, p.State.Request)
}

// HeaderDisaggAuth carries the signature of the protected fields.
const HeaderDisaggAuth = "X-Trtllm-Disagg-Auth"

// CheckAuth verifies the signature of a request that names an address of KV
// (serve/disagg_auth.py). A worker without a key accepts such requests
// unsigned.
func (t *TRTLLM) CheckAuth(req *core.Request, p *TRTParams) *core.APIError {
	hasState, hasEndpoint := p.Raw.Has("encoded_opaque_state"), p.Raw.Has("ctx_info_endpoint")
	if t.cfg.AuthKey == "" || !hasState && !hasEndpoint {
		return nil
	}
	value := func(name string) any {
		if !p.Raw.Has(name) {
			return nil
		}
		text, _ := p.Raw.Str(name, "")
		return text
	}
	payload, _ := core.EncodeJSON(core.Obj("ctx_info_endpoint", value("ctx_info_endpoint"), "encoded_opaque_state", value("encoded_opaque_state")))
	mac := hmac.New(sha256.New, []byte(t.cfg.AuthKey))
	mac.Write(AsciiJSON(payload))
	if !hmac.Equal([]byte("sha256="+hex.EncodeToString(mac.Sum(nil))), []byte(req.Header.Get(HeaderDisaggAuth))) {
		return trtBadRequest("Invalid internal disaggregated request authentication")
	}
	return nil
}

// AsciiJSON escapes all non-ASCII characters, as Python's json does.
func AsciiJSON(raw []byte) []byte {
	var out []byte
	for _, r := range string(raw) {
		switch {
		case r < 0x80:
			out = append(out, byte(r))
		case r < 0x10000:
			out = fmt.Appendf(out, `\u%04x`, r)
		default:
			r -= 0x10000
			out = fmt.Appendf(out, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		}
	}
	return out
}
