package connector

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

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
	}
	for _, key := range [...]string{"prompt_logprobs", "prompt_embeds"} {
		if v, _ := r.Get(key); !openai.IsNull(v) {
			return key
		}
	}
	if v, _ := r.Get("truncate_prompt_tokens"); len(v) > 0 && v[0] == '-' {
		return "truncate_prompt_tokens"
	}
	if r.API == openai.Completions {
		if echo, _ := r.Get("echo"); string(echo) == "true" && isSet(r, "logprobs") {
			return "logprobs"
		}
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

// A prefill leg ends after one token, which contains no whole tool call. If the client
// forces a tool call, older vLLM releases try to parse one and fail the request after
// its blocks were kept for decode. The answer is an error (400 or 500) that does not
// name the blocks. tool_choice cannot be left out either, because the template's prompt
// may depend on it.
//
//   - "required": the token is validated as the JSON of calls, up to 0.17 (pull request
//     36841); in /v1/responses up to 0.18 (37258).
//   - a named function: an assertion fails if a reasoning parser has consumed the
//     token, up to 0.20 (40148).
//
// Sources, in vLLM: entrypoints/openai/engine/serving.py
// _parse_tool_calls_from_content, parser/abstract_parser.py, anthropic/serving.py
// _convert_tool_choice; read in 0.17.1, 0.18.0, 0.19.0, 0.20.2 and 0.21.0.

// toolChoice is the kind of a request's tool choice: whether the request forces a tool
// call.
type toolChoice uint8

const (
	toolFree     toolChoice = iota // a call is optional
	toolRequired                   // a call of any tool is required
	toolNamed                      // a call of one named tool is required
)

func toolChoiceOf(api openai.API, choice []byte) toolChoice {
	switch api {
	case openai.Messages:
		switch text(choice, "type") {
		case "any":
			return toolRequired
		case "tool":
			return toolNamed
		}
	case openai.Chat, openai.Responses:
		if s, _ := openai.String(choice); s == "required" {
			return toolRequired
		}
		if isObject(choice) {
			return toolNamed
		}
	}
	return toolFree
}

// Unfit rejects forced tool calls if prefill's release fails on them, or may fail. It
// is sure for "required" with a known release.
func (nixl) Unfit(r *openai.Request, phase abi.Phase, t engine.Target) (reason string, sure bool, err error) {
	raw, given := r.Get("tool_choice")
	if !given || phase != abi.Prefill {
		return "", false, nil
	}
	choice := toolChoiceOf(r.API, raw)
	major, minor := release(t.Facts().Version)
	first := 0 // the first 0.x without the bug
	switch {
	case choice == toolFree || major > 0:
		return "", false, nil
	case choice == toolNamed:
		first = 21
	case r.API == openai.Responses:
		first = 19
	default:
		first = 18
	}
	if minor >= first {
		return "", false, nil
	}
	return "forced_tool", choice == toolRequired && minor > 0, notPairable("tool_choice",
		"'tool_choice' forces a tool call, on which prefill engines of this release fail, and no engine here serves the request whole.")
}

// vllmHeader returns the header lines of a leg to a vLLM engine: the request id and the
// placed rank.
func vllmHeader(id string, t engine.Target) []Field {
	fields := make([]Field, 1, 2)
	fields[0] = Field{Name: "X-Request-Id", Value: id}
	if t.Spec.Ranks > 1 {
		fields = append(fields, rankField(t.Rank))
	}
	return fields
}

// vllmLeg returns a leg to t with a's body after the edits, without the client's PD fields.
// Both legs of an attempt have the same request id. Only Anthropic's routes reject a body without
// a model (anthropic/protocol.py).
func vllmLeg(a *Attempt, id string, t engine.Target, dst []byte, edits []openai.Edit) Leg {
	if a.Request.API.Anthropic() && !a.Request.HasModel {
		edits = append(edits, modelNamed(a))
	}
	leg := spliced(a, dst, edits)
	leg.Header = vllmHeader(id, t)
	return leg
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

// transferParams returns kv_transfer_params of prefill's answer, or nil if it has none. It
// validates the whole answer and the types of the parameters. own is that of checkParams.
func transferParams(answer []byte, holder, peer *engine.Instance) (params []byte, own bool, err error) {
	if !isObject(answer) {
		return nil, false, badReply("no JSON object")
	}
	params, _, err = openai.Lookup(answer, "kv_transfer_params")
	switch {
	case err != nil:
		return nil, false, badReply(err.Error())
	case openai.IsNull(params):
		return nil, false, nil
	case !isObject(params):
		return nil, false, badReply("kv_transfer_params is no object")
	}
	own, err = checkParams(params, holder, peer)
	return params, own, err
}

// namesBlocks reports whether params name a block that prefill holds. In vLLM the ids
// are numbers, flat or in one list for each cache group, and all lists may be empty. In
// llm-d's simulator they are strings.
func namesBlocks(params []byte) bool {
	blocks, _ := openai.Find(params, "remote_block_ids")
	return bytes.ContainsAny(blocks, `0123456789"`)
}

// metricsPath is the only HTTP route on which a vLLM server describes its KV cache. An
// engine may lack it; that is no error.
const metricsPath = "/metrics"

// metricsRoute reports load if the engine serves its metrics: vLLM does, SGLang with
// --enable-metrics.
var metricsRoute = engine.LoadRoute{Path: metricsPath, Form: engine.LoadMetrics}

// readCacheConfig copies block size and type of the KV cache. They are labels of a
// gauge (v1/metrics/loggers.py, vllm:cache_config_info). The type auto means the
// model's type.
func readCacheConfig(f *engine.Facts, body []byte) {
	_, rest, ok := bytes.Cut(body, []byte("\nvllm:cache_config_info{"))
	if !ok {
		return
	}
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	if n, err := strconv.Atoi(label(line, "block_size")); err == nil && n > 0 && n <= 1<<20 {
		f.PageSize = n
	}
	if kind := label(line, "cache_dtype"); kind != "auto" && len(kind) <= maxCacheType {
		f.KVCacheType = kind
	}
}

// processStart returns the start time of the engine's process from its metrics, or "".
// Source: vLLM, v1/metrics/prometheus.py get_prometheus_registry, which is
// prometheus_client's REGISTRY with its ProcessCollector, unless several API servers
// share a directory of metrics.
func processStart(body []byte) string {
	_, rest, ok := bytes.Cut(body, []byte("\nprocess_start_time_seconds "))
	if !ok {
		return ""
	}
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	if _, err := strconv.ParseFloat(string(line), 64); err != nil || len(line) > maxProcessStart {
		return ""
	}
	return string(line)
}

// maxProcessStart bounds the text of a time, in bytes.
const maxProcessStart = 32

// maxCacheType bounds the name of a type, in bytes.
const maxCacheType = 32

// label returns the value of a label without escapes, or "".
func label(line []byte, name string) string {
	for {
		_, rest, ok := bytes.Cut(line, []byte(name+`="`))
		if !ok {
			return ""
		}
		if before := line[:len(line)-len(rest)-len(name)-2]; len(before) > 0 && before[len(before)-1] != ',' {
			line = rest // this is the end of a longer name
			continue
		}
		value, _, _ := bytes.Cut(rest, []byte(`"`))
		return string(value)
	}
}

// nixlCompatible rejects pairs that the engines' own handshake would reject at the
// first request (nixl/metadata.py compute_nixl_compatibility_hash, which since vLLM
// 0.13 contains the release and the type of the KV cache), and pairs between which no
// block can be copied (base_worker.py _validate_remote_agent_handshake: prefill's block
// size must divide decode's). No HTTP route reports the model's hash, the attention
// back end or the layout.
func nixlCompatible(p, d *engine.Facts) error {
	switch {
	case p.Version != d.Version && hashesVersion(p.Version) && hashesVersion(d.Version):
		return fmt.Errorf("releases differ: prefill %s, decode %s", p.Version, d.Version)
	case p.KVCacheType != "" && d.KVCacheType != "" && p.KVCacheType != d.KVCacheType:
		return fmt.Errorf("KV cache types differ: prefill %s, decode %s", p.KVCacheType, d.KVCacheType)
	case p.PageSize != 0 && d.PageSize != 0 && d.PageSize%p.PageSize != 0:
		return fmt.Errorf("prefill's blocks of %d tokens do not divide decode's of %d", p.PageSize, d.PageSize)
	}
	return nil
}

// hashesVersion reports whether a vLLM release compares its version with its peer's.
func hashesVersion(version string) bool {
	major, minor := release(version)
	return major > 0 || minor >= 13
}

// release returns the numbers of a vLLM release. It returns 0, 0 if the version is
// unknown, or for a build without a release number (0.1.dev…).
func release(version string) (major, minor int) {
	first, rest, _ := strings.Cut(version, ".")
	second, _, _ := strings.Cut(rest, ".")
	major, errA := strconv.Atoi(first)
	minor, errB := strconv.Atoi(second)
	if errA != nil || errB != nil || major < 0 || minor < 0 || major == 0 && minor <= 1 {
		return 0, 0
	}
	return major, minor
}
