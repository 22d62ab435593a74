package vllm

import (
	"encoding/json"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// parsed is the state of vLLM's parsers behind the output so far of a chat answer: a reasoning
// parser if the answer has reasoning, and a tool parser if the request has tools
// (parser/abstract_parser.py, DelegatingParser). Only the reasoning parser reads the prompt, and
// only for the end of reasoning.
type parsed struct {
	ended     bool // reasoning has ended, or there is none
	thinking  bool // the output has the begin of reasoning, and not its end
	calls     int  // calls that have begun
	calling   bool // the last of them has not ended
	tools     bool // there is a tool parser
	tool      string
	reasoning bool // there is a reasoning parser
}

// newParsed returns the state before the output.
func newParsed(s *core.Sequence) parsed {
	p := parsed{reasoning: s.Script.Reason > 0}
	var tools []struct{ Function struct{ Name string } }
	if json.Unmarshal(s.Req.Fields["tools"], &tools) == nil && len(tools) > 0 {
		p.tools, p.tool = true, tools[0].Function.Name
	}
	// reasoning/basic_parsers.py, is_reasoning_end: the last of both tokens counts.
	last := len(s.Prompt) - 1
	for last >= 0 && s.Prompt[last] != core.TokenThink && s.Prompt[last] != core.TokenThinkEnd {
		last--
	}
	p.ended = !p.reasoning || last >= 0 && s.Prompt[last] == core.TokenThinkEnd
	return p
}

// step moves the state behind a token, and returns the delta of a text that the token brings, nil
// for none.
func (p *parsed) step(s *core.Sequence, t core.Token, text string) core.Object {
	text = core.WithoutSpecials(text)
	switch {
	case !p.ended:
		switch t {
		case core.TokenThink:
			p.thinking = true
			return nil
		case core.TokenThinkEnd:
			p.thinking, p.ended = false, true
			return nil
		}
		// extract_reasoning_streaming looks for the begin of reasoning in the output only.
		return delta(p.thinking, text)
	case p.tools && t == core.TokenCall:
		p.calls, p.calling = p.calls+1, true
		return core.Obj("tool_calls", []any{core.Obj("id", "chatcmpl-tool-"+core.RandomID(), "type", "function", "index", p.calls-1,
			"function", core.Obj("name", p.tool, "arguments", `{"text":"`))})
	case p.tools && t == core.TokenCallEnd && p.calling:
		p.calling = false
		return p.arguments(`"}`)
	case p.calling:
		return p.arguments(text)
	}
	return delta(false, text)
}

func delta(reasoning bool, text string) core.Object {
	if reasoning {
		return core.Obj("reasoning", text)
	}
	return core.Obj("content", text)
}

func (p *parsed) arguments(text string) core.Object {
	return core.Obj("tool_calls", []any{core.Obj("index", p.calls-1, "function", core.Obj("arguments", text))})
}

// parses reports whether an answer has a structure, which the parsers find.
func parses(s *core.Sequence) bool {
	return s.Req.Route == core.RouteChat && s.Script != (core.Script{})
}

// parsedDelta returns the delta of the newest piece of an answer, nil for none, and whether a call
// was streamed. An event has one token, so the delta has one kind.
func parsedDelta(s *core.Sequence, piece core.Piece) (core.Object, bool) {
	p := newParsed(s)
	first := len(s.Output) - len(piece.Tokens)
	for _, t := range s.Output[:first] {
		p.step(s, t, "")
	}
	var last core.Object
	for i, t := range piece.Tokens {
		text := ""
		if i == len(piece.Tokens)-1 {
			text = piece.Text
		}
		if d := p.step(s, t, text); d != nil {
			last = d
		}
	}
	return last, p.calls > 0
}

// parsedMessage returns the parts of a whole answer: text, reasoning and calls.
func parsedMessage(s *core.Sequence) (content, reasoning any, calls []any) {
	p := newParsed(s)
	var text, thought strings.Builder
	var arguments []*strings.Builder
	for i, token := range core.TokenTexts(s.Output) {
		t := s.Output[i]
		before := p
		p.step(s, t, "")
		special := t >= core.TokenThink && t <= core.TokenCallEnd
		switch {
		case p.calls > before.calls:
			arguments = append(arguments, new(strings.Builder))
		case special:
		case !p.ended && p.thinking:
			thought.WriteString(token)
		case p.calling:
			arguments[len(arguments)-1].WriteString(token)
		default:
			text.WriteString(token)
		}
	}
	for _, a := range arguments {
		calls = append(calls, core.Obj("id", "chatcmpl-tool-"+core.RandomID(), "type", "function",
			"function", core.Obj("name", p.tool, "arguments", `{"text":"`+a.String()+`"}`)))
	}
	return core.OrNull(text.String()), core.OrNull(thought.String()), slices.Clip(calls)
}
