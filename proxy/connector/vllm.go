package connector

import (
	"errors"
	"slices"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// vllmHeader returns the header lines of a leg to a vLLM engine: the request id, which
// both legs of an attempt share, and the placed rank.
func vllmHeader(legID string, t engine.Target) []Field {
	fields := make([]Field, 1, 2)
	fields[0] = Field{Name: "X-Request-Id", Value: legID}
	return rankHeader(fields, t.Spec.Ranks, t.Rank)
}

// vllmLeg returns the leg of a's body with the edits applied and the client's PD fields
// cut out. Anthropic's routes are the only ones that reject a body without a model
// (anthropic/protocol.py).
func vllmLeg(a *Attempt, dst []byte, edits []openai.Edit) Leg {
	if a.Request.API.Anthropic() && !a.Request.HasModel {
		edits = append(edits, modelNamed(a))
	}
	return spliced(a, dst, cutPD(edits, a))
}

// vllmUnsplit returns the member of a request that vLLM answers wrongly from two legs,
// or "".
//
//   - prompt_logprobs (and echo with logprobs, which requests them): decode has no
//     hidden states of the tokens whose KV it received, and answers from uninitialized
//     memory (v1/worker/gpu_model_runner.py _get_prompt_logprobs_dict).
//   - truncate_prompt_tokens -1 and truncation: the prompt is cut to the space that
//     max_tokens leaves in the context, and the legs differ in max_tokens
//     (renderers/params.py TokenizeParams).
//   - prompt_embeds: there are no token ids by which blocks are counted.
//   - responses that refer to state on an engine, or whose tools the engine calls
//     itself: every turn after the first would read the blocks again, which are freed
//     by then (openai/responses/serving.py _generate_with_builtin_tools).
func vllmUnsplit(r *openai.Request) string {
	switch r.API {
	case openai.Responses:
		return unsplitResponse(r)
	case openai.VLLMGenerate:
		return unsplitGenerate(r)
	default:
		return unsplitText(r)
	}
}

func unsplitText(r *openai.Request) string {
	if isSet(r, "prompt_logprobs") {
		return "prompt_logprobs"
	}
	if isSet(r, "prompt_embeds") {
		return "prompt_embeds"
	}
	if v, _ := r.Get("truncate_prompt_tokens"); len(v) > 0 && v[0] == '-' {
		return "truncate_prompt_tokens"
	}
	if echo, _ := r.Get("echo"); r.API == openai.Completions && string(echo) == "true" && isSet(r, "logprobs") {
		return "logprobs"
	}
	return ""
}

func unsplitResponse(r *openai.Request) string {
	if isSet(r, "previous_response_id") {
		return "previous_response_id"
	}
	if v, _ := r.Get("background"); string(v) == "true" {
		return "background"
	}
	if v, _ := r.Get("truncation"); !openai.IsNull(v) && string(v) != `"disabled"` {
		return "truncation"
	}
	tools, _ := r.Get("tools")
	if openai.IsNull(tools) {
		return ""
	}
	list, err := openai.Elements(tools)
	if err != nil {
		return "" // the engine rejects it
	}
	for tool := range list {
		if !slices.Contains(clientTools, text(tool, "type")) {
			return "tools"
		}
	}
	return ""
}

// clientTools are the types of tools that no vLLM engine calls: functions, and the types that Codex
// sends (openai/codex codex-rs/tools/src/tool_spec.rs ToolSpec). Engines call the tools of the types
// web_search_preview, code_interpreter, container and mcp (openai/responses/serving.py
// create_responses). Later releases may call further types, so a type that is not in this list counts
// as a tool of the engine.
var clientTools = []string{"function", "namespace", "custom", "tool_search", "web_search", "image_generation"}

// unsplitGenerate also rejects sampling parameters that are not an object: the
// transfer's fields go into them.
func unsplitGenerate(r *openai.Request) string {
	params, _ := r.Get("sampling_params")
	if !isObject(params) {
		return "sampling_params"
	}
	if v, _, _ := openai.Lookup(params, "prompt_logprobs"); !openai.IsNull(v) {
		return "sampling_params.prompt_logprobs"
	}
	if v, _, _ := openai.Lookup(params, "extra_args"); !openai.IsNull(v) && !isObject(v) {
		return "sampling_params.extra_args"
	}
	return ""
}

func isSet(r *openai.Request, key string) bool {
	v, _ := r.Get(key)
	return !openai.IsNull(v)
}

// vllmSamplingParams returns the sampling_params of a tokens-in, tokens-out leg with
// the edits applied and with transfer in extra_args, from which the Python server reads
// the transfer's params (it drops those outside). If transfer is nil, the params are
// left out.
func vllmSamplingParams(a *Attempt, transfer []byte, edits ...openai.Edit) ([]byte, error) {
	params, _ := a.Request.Get("sampling_params")
	args, _ := openai.Find(params, "extra_args")
	switch {
	case !isObject(params) || !openai.IsNull(args) && !isObject(args):
		return nil, errNoSamplingParams
	case openai.IsNull(args):
		args = literal("{}")
	}
	ours := ""
	if transfer != nil {
		ours = "kv_transfer_params"
	}
	if !a.Trust {
		params, args = openai.CutTransferParams(params, "extra_args"), openai.CutTransferParams(args, ours)
	}
	if ours != "" {
		args = openai.AppendEdited(nil, args, openai.Edit{Key: ours, Value: transfer})
	}
	edits = append(edits, openai.Edit{Key: "extra_args", Value: args})
	return openai.AppendEdited(nil, params, edits...), nil
}

// errNoSamplingParams: Pairable rejects such a request.
var errNoSamplingParams = errors.New("sampling_params and its extra_args must be objects")
