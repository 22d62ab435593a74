// Package continuation has the decisions about a stream whose decode engine died: whether another
// engine can go on with it, where the new answer begins, the request that asks for it, and the
// events of the new answer as the client must see them. It does no I/O and has no state. The
// exchange keeps the stream's token ids and its last events, and calls this package.
//
// The decisions behind this package are in docs/design/continue.md.
package continuation

import (
	"bytes"

	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// Reason says why a stream is not continued. The zero value says that it can be.
type Reason string

// The reasons. They are labels of a metric and part of the error event.
const (
	NoIDs      Reason = "no_ids"     // the engine's events have no token ids
	Cumulative Reason = "cumulative" // each event repeats the events before it
	Sequences  Reason = "sequences"  // more than one sequence: n, best_of, a beam search, several prompts
	Guided     Reason = "guided"     // a grammar begins at its root in a new request
	Sampling   Reason = "sampling"   // a sampling parameter depends on the output alone
	Prompt     Reason = "prompt"     // the prompt is more than its token ids, or belongs to the answer
	Reasoning  Reason = "reasoning"  // the answer is inside a block of reasoning
	ToolCalls  Reason = "tool_calls" // the answer has begun a call of a tool
	Seam       Reason = "seam"       // no place is known at which the texts of both engines meet
	Off        Reason = "off"        // the configuration or the client does not want it
	TooLong    Reason = "too_long"   // more tokens than retry.continue_tokens
	Memory     Reason = "memory"     // limits.buffer_memory had no room for the ids
	Refused    Reason = "refused"    // the engine or the proxy ended the stream on purpose
	Attempts   Reason = "attempts"   // the stream has broken too often
	Late       Reason = "late"       // no engine went on in time
	Budget     Reason = "budget"     // the retry budget was used up
	NoEngine   Reason = "no_engine"  // no engine could go on
)

// Check returns the reason why a stream with this request cannot be continued, "" if it can be.
// d is the kind of the engines that serve it. It does not look at the stream.
func Check(d tokens.Dialect, r *openai.Request) Reason {
	switch {
	case r.API == openai.Completions && (d == tokens.VLLM || d == tokens.SGLang):
	case (r.API == openai.Chat || r.API == openai.VLLMGenerate) && d == tokens.VLLM:
	case r.API == openai.Generate && d == tokens.SGLang:
		return Cumulative
	default:
		return NoIDs
	}
	if r.N > 1 || r.BestOf > 1 || r.BeamSearch || r.PromptCount > 1 {
		return Sequences
	}
	if images, audio := r.Media(); images || audio {
		return Prompt
	}
	reason := Reason("")
	r.Members(func(key string, value []byte) bool {
		reason = member(d, key, value)
		return reason == ""
	})
	if reason != "" || r.API != openai.VLLMGenerate {
		return reason
	}
	params, _ := r.Get("sampling_params")
	c := openai.Cursor{Text: params}
	for c.Open('{'); reason == "" && c.Next('}'); {
		key := string(c.Key)
		value := c.Skip()
		if reason = member(d, key, value); key == "stop" && reason == "" {
			// The client has all ids, so none can be generated again to find a stop string.
			reason = unless(Sampling, openai.IsNull(value) || string(value) == "[]")
		}
	}
	return reason
}

// member returns the reason that one member of a request gives. The members are those of vLLM
// (entrypoints/openai/completion/protocol.py, chat_completion/protocol.py, sampling_params.py) and
// SGLang (srt/entrypoints/openai/protocol.py).
func member(d tokens.Dialect, key string, value []byte) Reason {
	if openai.IsNull(value) {
		return ""
	}
	switch key {
	case "include_reasoning": // with a parser, vLLM hides the ids (chat_completion/stream_processor.py)
		return unless(NoIDs, string(value) == "true")
	case "response_format":
		kind, _ := openai.Find(value, "type")
		return unless(Guided, string(kind) == `"text"`)
	case "tool_choice":
		return unless(Guided, string(value) == `"auto"` || string(value) == `"none"`)
	case "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding",
		"structural_tag", "json_schema", "regex", "ebnf":
		return Guided
	case "presence_penalty", "frequency_penalty":
		return unless(Sampling, isNumber(value, "0"))
	case "repetition_penalty": // vLLM counts prompt and output alike
		return unless(Sampling, d == tokens.VLLM || isNumber(value, "1"))
	case "bad_words", "stop_regex":
		return unless(Sampling, string(value) == "[]")
	case "thinking_token_budget", "repetition_detection", "custom_logit_processor", "custom_params", "logits_processors",
		"vllm_xargs", "watermark", "watermarking":
		return Sampling
	case "echo":
		return unless(Prompt, string(value) == "false")
	case "suffix":
		return unless(Prompt, string(value) == `""`)
	case "prompt_logprobs", "prompt_embeds", "session_params", "features", "content_parts":
		return Prompt
	}
	return ""
}

// harmonyStart is the token that begins each message of gpt-oss, <|start|>, in its tokenizer_config.json.
var harmonyStart = []byte("[200006,")

// Harmony reports whether the prompt of a chat, a list as FindPrompt returns it, is one of gpt-oss. The engines' parsers of its answers
// read only the output, and wait for the header of a message
// (vLLM parser/harmony.py).
func Harmony(prompt []byte) bool { return bytes.HasPrefix(prompt, harmonyStart) }

// unless returns "" if ok, else the reason.
func unless(reason Reason, ok bool) Reason {
	if ok {
		return ""
	}
	return reason
}

// isNumber reports whether a raw number is the integer n, also as a fraction of zeros. Another
// form of the same number counts as different.
func isNumber(raw []byte, n string) bool {
	text := string(raw)
	return text == n || text == n+".0"
}

// Ask appends the edit that makes the engine put token ids into its events.
func Ask(dst []openai.Edit, r *openai.Request) []openai.Edit {
	if r.API == openai.VLLMGenerate { // its events always have them
		return dst
	}
	return append(dst, openai.Edit{Key: askMember, Value: []byte("true")})
}

// askMember is the member that asks for token ids: vLLM and SGLang have the same one.
const askMember = "return_token_ids"

// Asked reports whether the client itself asks for the ids, so that they stay in the events.
func Asked(r *openai.Request) bool {
	v, _ := r.Get(askMember)
	return string(v) == "true"
}
