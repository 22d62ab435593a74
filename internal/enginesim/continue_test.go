package enginesim

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// list is the JSON of token ids.
func list(ids []core.Token) string {
	raw, _ := json.Marshal(ids)
	return string(raw)
}

// continued are the ways to give an engine a prompt of token ids and the messages of a chat.
// Extra is appended to the body, MESSAGES replaced.
var continued = []struct {
	name, connector, route, body string
}{
	{"vLLM completions", ConnectorNone, core.RouteCompletions, `{"model":"sim","prompt":IDS EXTRA}`},
	{"vLLM chat", ConnectorNone, core.RouteChat, `{"model":"sim","messages":[{"role":"user","content":"other"}],"kv_transfer_params":{"prompt_token_ids":IDS} EXTRA}`},
	{"vLLM chat with a connector", ConnectorVLLMNixl, core.RouteChat, `{"model":"sim","messages":[{"role":"user","content":"other"}],"kv_transfer_params":{"prompt_token_ids":IDS} EXTRA}`},
	{"SGLang completions", ConnectorSGLang, core.RouteCompletions, `{"model":"sim","prompt":IDS EXTRA}`},
	{"SGLang chat", ConnectorSGLang, core.RouteChat, `{"model":"sim","messages":[{"role":"user","content":"other"}],"input_ids":IDS EXTRA}`},
	{"TensorRT-LLM completions", ConnectorTRTLLM, core.RouteCompletions, `{"model":"sim","prompt":IDS EXTRA}`},
	{"TensorRT-LLM chat", ConnectorTRTLLM, core.RouteChat, `{"model":"sim","messages":[{"role":"user","content":"other"}],"prompt_token_ids":IDS EXTRA}`},
}

// wholeOutput returns the tokens of a greedy answer to a prompt.
func wholeOutput(t *testing.T, e *Engine, prompt []core.Token, extra string) []core.Token {
	t.Helper()
	a := post(t, e.URL()+core.RouteCompletions, `{"model":"sim","return_token_ids":true,"prompt":`+list(prompt)+extra+`}`)
	var v struct {
		Choices []struct {
			TokenIDs []core.Token `json:"token_ids"`
		}
	}
	if err := json.Unmarshal(a.body, &v); err != nil || len(v.Choices) != 1 {
		t.Fatalf("answer %s: %v", a.body, err)
	}
	return v.Choices[0].TokenIDs
}

// TestContinuedAnswer: an engine that gets a prompt and the first tokens of its answer as the
// prompt continues with the same tokens, wherever the answer is cut. Only a cut inside a letter
// gives another text, in the way of the engine (vLLM v1/engine/detokenizer.py; SGLang
// managers/detokenizer_manager.py; TensorRT-LLM tokenizer/tokenizer.py).
func TestContinuedAnswer(t *testing.T) {
	prompt := core.Tokenize("<|user|>tell <split> a story\n<|assistant|>")
	whole := startEngine(t, Config{})
	const n = 40
	output := wholeOutput(t, whole, prompt, fmt.Sprintf(`,"max_tokens":%d`, n))
	inside := 0
	for _, c := range continued {
		t.Run(c.name, func(t *testing.T) {
			e := startEngine(t, Config{Connector: c.connector, Role: RoleBoth})
			for k := range n {
				ids := append(slices.Clone(prompt), output[:k]...)
				before, after := core.Detokenize(ids), core.Detokenize(output[k:])
				letter := 0 // bytes of a letter that the cut separates
				for !utf8.ValidString(after[letter:]) && !utf8.RuneStart(after[letter]) {
					letter++
				}
				if !strings.HasSuffix(core.ValidText(before), "\ufffd") {
					letter = 0
				} else {
					inside++
				}
				want := after[letter:]
				switch {
				case letter == 0:
				case strings.HasPrefix(c.name, "vLLM"):
					want = before + after
				case strings.HasPrefix(c.name, "TensorRT"):
					want = core.ValidText(after)
				}
				if open := len(want); !utf8.ValidString(want) && strings.HasPrefix(c.name, "vLLM") {
					for !utf8.ValidString(want[:open]) {
						open--
					}
					want = want[:open] // the answer ends inside a letter
				}
				want = core.ValidText(want)
				for _, stream := range []bool{false, true} {
					body := strings.NewReplacer("IDS", list(ids), "EXTRA", fmt.Sprintf(`,"max_tokens":%d,"stream":%t`, n-k, stream)).Replace(c.body)
					if got := post(t, e.URL()+c.route, body).text(t); got != want {
						t.Errorf("cut at %d, stream %t:\n%q, want\n%q", k, stream, got, want)
					}
				}
			}
		})
	}
	if inside < 20 {
		t.Errorf("only %d cuts inside a letter", inside)
	}
}

// TestContinuedEnd: an answer that is continued ends where the whole answer ends: at its natural
// end, at the mark for an end, and at a stop string.
func TestContinuedEnd(t *testing.T) {
	whole := startEngine(t, Config{})
	for name, c := range map[string]struct{ prompt, extra string }{
		"natural end":  {"<|user|>hi\n<|assistant|>", ""},
		"mark":         {"<|user|>hi <eos9>\n<|assistant|>", ""},
		"mark, limit":  {"<|user|>hi <split> <eos20>\n<|assistant|>", `,"max_tokens":100`},
		"split":        {"<|user|>ho <split>\n<|assistant|>", ""},
		"minimum":      {"<|user|>hi <eos9>\n<|assistant|>", `,"max_tokens":15,"min_tokens":12`},
		"end of words": {"<|user|>ho <eos3>\n<|assistant|>", ""},
	} {
		t.Run(name, func(t *testing.T) {
			prompt := core.Tokenize(c.prompt)
			chat := strings.NewReplacer("IDS", list(prompt), "EXTRA", c.extra).Replace(continued[1].body)
			want := post(t, whole.URL()+core.RouteChat, chat)
			finish := want.field(t, "choices", 0, "finish_reason")
			total := want.field(t, "usage", "completion_tokens").(json.Number)
			length, _ := total.Int64()
			output := wholeOutput(t, whole, prompt, fmt.Sprintf(`,"max_tokens":%d%s`, length, strings.ReplaceAll(c.extra, `"max_tokens"`, `"min_p"`)))
			for _, k := range []int64{1, 2, length / 2, length - 1} {
				extra := strings.NewReplacer(`"max_tokens":100`, fmt.Sprintf(`"max_tokens":%d`, 100-k),
					`"max_tokens":15,"min_tokens":12`, fmt.Sprintf(`"max_tokens":%d,"min_tokens":%d`, 15-k, max(0, 12-k))).Replace(c.extra)
				ids := append(slices.Clone(prompt), output[:k]...)
				if strings.HasSuffix(core.ValidText(core.Detokenize(ids)), "\ufffd") {
					continue // another text
				}
				body := strings.NewReplacer("IDS", list(ids), "EXTRA", extra).Replace(continued[1].body)
				got := post(t, whole.URL()+core.RouteChat, body)
				if text := core.Detokenize(output[:k]) + got.text(t); text != want.text(t) {
					t.Errorf("cut at %d: %q, want %q", k, text, want.text(t))
				}
				if got.field(t, "choices", 0, "finish_reason") != finish {
					t.Errorf("cut at %d: %s, want %v", k, got.body, finish)
				}
				if n, _ := got.field(t, "usage", "completion_tokens").(json.Number).Int64(); n != length-k {
					t.Errorf("cut at %d: %d tokens, want %d", k, n, length-k)
				}
			}
		})
	}
}

// TestOwnOutput: parameters whose effect depends on the output of a request alone make a
// continuation another text; the others do not.
func TestOwnOutput(t *testing.T) {
	engines := map[string]*Engine{
		ConnectorNone: startEngine(t, Config{}), ConnectorSGLang: startEngine(t, Config{Connector: ConnectorSGLang, Role: RoleBoth}),
	}
	for extra, differs := range map[string][2]bool{ // vLLM, SGLang
		`"seed":7`:                                 {true, true},
		`"presence_penalty":0.5`:                   {true, true},
		`"frequency_penalty":0.5`:                  {true, true},
		`"repetition_penalty":1.2`:                 {false, true},
		`"response_format":{"type":"json_object"}`: {true, true},
		`"temperature":0`:                          {false, false},
		`"stop":["never"]`:                         {false, false},
	} {
		for i, connector := range []string{ConnectorNone, ConnectorSGLang} {
			t.Run(connector+" "+extra, func(t *testing.T) {
				prompt := core.Tokenize("<|user|>hi\n<|assistant|>")
				ask := func(ids []core.Token, n int) string {
					return post(t, engines[connector].URL()+core.RouteCompletions, fmt.Sprintf(`{"model":"sim","prompt":%s,"max_tokens":%d,%s}`, list(ids), n, extra)).text(t)
				}
				want := ask(prompt, 12)
				ids := append(slices.Clone(prompt), core.Tokenize(ask(prompt, 4))...)
				if got := ask(prompt, 4) + ask(ids, 8); (got != want) != differs[i] {
					t.Errorf("continued %q, whole %q", got, want)
				}
			})
		}
	}
}

// events are the data of a stream's events, without the last "[DONE]".
func events(t *testing.T, a answer) (list []map[string]any) {
	t.Helper()
	for event := range strings.SplitSeq(strings.TrimSpace(string(a.body)), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		if data == "[DONE]" {
			continue
		}
		var v map[string]any
		if err := json.Unmarshal([]byte(data), &v); !ok || err != nil {
			t.Fatalf("event %q: %v", event, err)
		}
		list = append(list, v)
	}
	return list
}

// TestTokensOfEvents: the token ids of the events together are those of the output, and their
// texts belong to them: behind an event with text the output ends with a letter, except in SGLang.
// With stop strings vLLM's ids are ahead of its text, and SGLang's are not.
func TestTokensOfEvents(t *testing.T) {
	prompt := core.Tokenize("<|user|>tell <split> a story\n<|assistant|>")
	whole := startEngine(t, Config{})
	for name, c := range map[string]struct {
		connector, route, extra string
		ahead                   bool // ids of an event may be ahead of its text
		tears                   bool // an event may end inside a letter
	}{
		"vLLM completions":    {ConnectorNone, core.RouteCompletions, "", false, false},
		"vLLM chat":           {ConnectorNone, core.RouteChat, "", false, false},
		"vLLM, stop string":   {ConnectorNone, core.RouteCompletions, `,"stop":["\n\n\n\n"]`, true, false},
		"SGLang completions":  {ConnectorSGLang, core.RouteCompletions, "", false, true},
		"SGLang, stop string": {ConnectorSGLang, core.RouteCompletions, `,"stop":["rol no"]`, false, true},
		"vLLM, stop of words": {ConnectorNone, core.RouteCompletions, `,"stop":["rol no"]`, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			e := startEngine(t, Config{Connector: c.connector, Role: RoleBoth})
			const n = 40
			output := wholeOutput(t, whole, prompt, fmt.Sprintf(`,"max_tokens":%d`, n))
			form := `{"model":"sim","prompt":IDS EXTRA}`
			if c.route == core.RouteChat {
				form = continued[1].body
			}
			body := strings.NewReplacer("IDS", list(prompt), "EXTRA", fmt.Sprintf(`,"max_tokens":%d,"stream":true,"return_token_ids":true%s`, n, c.extra)).Replace(form)
			var ids []core.Token
			text, torn, ahead := "", 0, 0
			for i, event := range events(t, post(t, e.URL()+c.route, body)) {
				choice := event["choices"].([]any)[0].(map[string]any)
				if i == 0 {
					first := maps.Clone(event)
					maps.Copy(first, choice)
					if got := fmt.Sprint(first["prompt_token_ids"]); got != fmt.Sprint(asFloats(prompt)) {
						t.Errorf("prompt ids %s", got)
					}
				} else if choice["prompt_token_ids"] != nil || event["prompt_token_ids"] != nil {
					t.Errorf("prompt ids in event %d", i)
				}
				list, _ := choice["token_ids"].([]any)
				for _, id := range list {
					ids = append(ids, core.Token(id.(float64)))
				}
				delta, _ := choice["text"].(string)
				if d, ok := choice["delta"].(map[string]any); ok {
					delta, _ = d["content"].(string)
				}
				text += delta
				of := core.Detokenize(ids)
				switch {
				case delta == "" || choice["finish_reason"] != nil:
				case !utf8.ValidString(of):
					torn++
				case of != text:
					ahead++
				}
			}
			if !slices.Equal(ids, output) {
				t.Errorf("ids\n%v, want\n%v", ids, output)
			}
			if (torn > 0) != c.tears || (ahead > 0) != c.ahead {
				t.Errorf("%d events end inside a letter, the ids of %d are ahead", torn, ahead)
			}
		})
	}
}

func asFloats(ids []core.Token) []any {
	list := make([]any, len(ids))
	for i, id := range ids {
		list[i] = float64(id)
	}
	return list
}

// TestContinuedParsers: only vLLM's reasoning parser reads the prompt, and only for the end of
// reasoning. An answer that is continued inside reasoning or a call becomes content
// (vLLM reasoning/basic_parsers.py, tool_parsers/abstract_tool_parser.py).
func TestContinuedParsers(t *testing.T) {
	e := startEngine(t, Config{})
	prompt := core.Tokenize("<|user|>hi <reason 3> <tool 2>\n<|assistant|>")
	output := wholeOutput(t, e, prompt, `,"max_tokens":40`)
	ask := func(k int) (content, reasoning any, calls bool) {
		ids := append(slices.Clone(prompt), output[:k]...)
		a := post(t, e.URL()+core.RouteChat, strings.NewReplacer("IDS", list(ids), "EXTRA", `,"tools":[{"type":"function","function":{"name":"echo"}}]`).Replace(continued[1].body))
		m := a.field(t, "choices", 0, "message")
		return a.field(t, "choices", 0, "message", "content"), a.field(t, "choices", 0, "message", "reasoning"), m.(map[string]any)["tool_calls"] != nil
	}
	// think 3 words think-end 2 words call 4 words call-end end
	if len(output) != 14 || output[0] != core.TokenThink || output[4] != core.TokenThinkEnd || output[7] != core.TokenCall || output[12] != core.TokenCallEnd {
		t.Fatalf("output %v", output)
	}
	words := func(from, to int) string { return core.Detokenize(output[from:to]) }
	for k, want := range map[int]struct {
		content, reasoning any
		call               bool
	}{
		0:  {words(5, 7), words(1, 4), true},
		2:  {words(2, 4) + words(5, 7), nil, true}, // the rest of the reasoning becomes content
		4:  {words(5, 7), nil, true},
		5:  {words(5, 7), nil, true},
		6:  {words(6, 7), nil, true},
		9:  {words(9, 12), nil, false}, // the rest of the argument becomes content
		13: {nil, nil, false},
	} {
		content, reasoning, call := ask(k)
		if content != want.content || reasoning != want.reasoning || call != want.call {
			t.Errorf("behind %d tokens: content %q, reasoning %q, a call %t; want %q, %q, %t", k, content, reasoning, call, want.content, want.reasoning, want.call)
		}
	}
}
