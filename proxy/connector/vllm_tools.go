package connector

import (
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// A prefill leg ends after one token, of which no tool call can be read. Older vLLM
// releases try to, where the client wants one for certain, and fail the request
// when its blocks are kept for decode already; the answer is an error (400 or 500),
// which says nothing of them. What a template makes of the prompt may depend on
// tool_choice, so that it cannot be left out either.
//
//   - "required": the token is validated as the JSON of calls, up to 0.17
//     (pull request 36841); in /v1/responses up to 0.18 (37258).
//   - a function that is named: an assertion fails where a reasoning parser has
//     taken the token, up to 0.20 (40148).
//
// Sources, in vLLM: entrypoints/openai/engine/serving.py
// _parse_tool_calls_from_content, parser/abstract_parser.py, anthropic/serving.py
// _convert_tool_choice; read in 0.17.1, 0.18.0, 0.19.0, 0.20.2 and 0.21.0.

// toolChoice is how firmly a request asks for a tool call.
type toolChoice uint8

const (
	toolFree     toolChoice = iota // it may
	toolRequired                   // of any tool
	toolNamed                      // of that one
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

// Unfit refuses forced tool calls where prefill's release fails on them, or may. It
// is sure of "required" and a release that is known.
func (nixl) Unfit(r *openai.Request, prefill *engine.Facts) (sure bool, err error) {
	choice := toolChoiceOf(r)
	major, minor := release(prefill.Version)
	first := 0 // the first 0.x without the fault
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
