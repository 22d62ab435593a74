package connector

import (
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

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

func toolChoiceOf(r *openai.Request) toolChoice {
	choice, _ := r.Get("tool_choice")
	switch r.API {
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
func (nixl) Unfit(r *openai.Request, prefill *engine.Facts) (sure bool, err error) {
	choice := toolChoiceOf(r)
	major, minor := release(prefill.Version)
	first := 0 // the first 0.x without the bug
	switch {
	case choice == toolFree || major > 0:
		return false, nil
	case choice == toolNamed:
		first = 21
	case r.API == openai.Responses:
		first = 19
	default:
		first = 18
	}
	if minor >= first {
		return false, nil
	}
	return choice == toolRequired && minor > 0, notPairable("tool_choice",
		"'tool_choice' forces a tool call, on which prefill engines of this release fail, and no engine here serves the request whole.")
}
