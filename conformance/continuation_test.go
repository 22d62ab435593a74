package conformance

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/continuation"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// seen is the content of a stream as a client reads it.
type seen struct {
	text, finish, id string
	thought, calls   string
	tokens           []string // of log probabilities, with their offsets
	usage            map[string]any
	roles            int
	ids              int // events with ids
}

// readStream reads events.
func readStream(t *testing.T, events []byte) (s seen) {
	t.Helper()
	for event := range strings.SplitSeq(strings.TrimSpace(string(events)), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var v struct {
			ID      string
			Request string `json:"request_id"` // of tokens
			Error   any
			Usage   map[string]any
			Choices []struct {
				Text  string
				Delta struct {
					Role, Content, Reasoning string
					Calls                    []struct {
						Index    int
						Function struct{ Name, Arguments string }
					} `json:"tool_calls"`
				}
				Finish string `json:"finish_reason"`
				IDs    []int  `json:"token_ids"`
				Probs  struct {
					Tokens  []string
					Offsets []int `json:"text_offset"`
					Content []struct{ Token string }
				} `json:"logprobs"`
			}
		}
		if err := json.Unmarshal([]byte(data), &v); err != nil || v.Error != nil {
			t.Fatalf("%s: %v", event, err)
		}
		v.ID = cmp.Or(v.ID, v.Request)
		if s.id != "" && s.id != v.ID {
			t.Errorf("the id changes from %s to %s", s.id, v.ID)
		}
		s.id = v.ID
		if v.Usage != nil {
			s.usage = v.Usage
			delete(s.usage, "prompt_tokens_details") // what the second engine had in its cache
		}
		for _, c := range v.Choices {
			s.text += c.Text + c.Delta.Content
			s.finish += c.Finish
			s.thought += c.Delta.Reasoning
			for _, call := range c.Delta.Calls {
				s.calls += fmt.Sprint(call.Index, call.Function.Name, call.Function.Arguments)
			}
			if c.Delta.Role != "" {
				s.roles++
			}
			if c.IDs != nil {
				s.ids++
			}
			for i, token := range c.Probs.Tokens {
				s.tokens = append(s.tokens, fmt.Sprint(token, c.Probs.Offsets[i]))
			}
			for _, one := range c.Probs.Content {
				s.tokens = append(s.tokens, one.Token)
			}
		}
	}
	return s
}

// ask sends a request to an engine and returns the body of its answer.
func ask(t *testing.T, url string, body []byte) []byte {
	t.Helper()
	resp, err := http.Post(url, "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s, %s, %v", body, resp.Status, raw, err)
	}
	return raw
}

// TestContinuation: package continuation and the simulated engines. A stream is broken behind each
// of its events and goes on at another engine. The client reads what one engine would have sent.
func TestContinuation(t *testing.T) {
	start := func(connector string) string {
		e, err := enginesim.New(enginesim.Config{Connector: connector, Role: enginesim.RoleBoth})
		if err == nil {
			err = e.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		return e.URL()
	}
	engines := map[tokens.Dialect][2]string{
		tokens.VLLM:   {start(enginesim.ConnectorNone), start(enginesim.ConnectorNone)},
		tokens.SGLang: {start(enginesim.ConnectorSGLang), start(enginesim.ConnectorSGLang)},
	}
	const chat, completion = `{"model":"sim","messages":[{"role":"user","content":"<split> tell"}]`, `{"model":"sim","prompt":"<split> tell me"`
	for name, c := range map[string]struct {
		d    tokens.Dialect
		api  openai.API
		body string
	}{
		"vLLM completions":                 {tokens.VLLM, openai.Completions, completion + `,"max_tokens":30`},
		"vLLM completions, default limit":  {tokens.VLLM, openai.Completions, completion},
		"vLLM completions, natural end":    {tokens.VLLM, openai.Completions, `{"model":"sim","prompt":"<split> tell <eos20>","max_tokens":40`},
		"vLLM completions, stop string":    {tokens.VLLM, openai.Completions, completion + `,"max_tokens":30,"stop":["never comes"]`},
		"vLLM completions, log probs":      {tokens.VLLM, openai.Completions, completion + `,"max_tokens":30,"logprobs":2`},
		"vLLM chat":                        {tokens.VLLM, openai.Chat, chat},
		"vLLM chat, limit, minimum, probs": {tokens.VLLM, openai.Chat, chat + `,"max_completion_tokens":30,"min_tokens":9,"logprobs":true`},
		"vLLM chat with reasoning":         {tokens.VLLM, openai.Chat, `{"model":"sim","messages":[{"role":"user","content":"<reason 9> tell <split>"}],"max_tokens":40`},
		"vLLM chat with a call":            {tokens.VLLM, openai.Chat, `{"model":"sim","messages":[{"role":"user","content":"<tool 20> tell"}],"tools":[{"type":"function","function":{"name":"echo"}}]`},
		"vLLM chat with both":              {tokens.VLLM, openai.Chat, `{"model":"sim","messages":[{"role":"user","content":"<reason 4> <tool 20> tell"}],"tools":[{"type":"function","function":{"name":"echo"}}]`},
		"SGLang completions":               {tokens.SGLang, openai.Completions, completion + `,"max_tokens":30,"rid":"R"`},
		"SGLang completions, log probs":    {tokens.SGLang, openai.Completions, completion + `,"max_tokens":30,"rid":"R","logprobs":1`},
		"SGLang completions, stop string":  {tokens.SGLang, openai.Completions, completion + `,"max_tokens":30,"rid":"R","stop":["never comes"]`},
	} {
		for _, temperature := range []string{"0", "0.7"} { // the engines are always greedy
			t.Run(name+", temperature "+temperature, func(t *testing.T) {
				body := c.body + `,"temperature":` + temperature + `,"stream":true,"stream_options":{"include_usage":true}}`
				r := new(openai.Request)
				if err := openai.ParseRequest(c.api, []byte(body), r); err != nil {
					t.Fatal(err)
				}
				if reason := continuation.Check(c.d, r); reason != "" {
					t.Fatal(reason)
				}
				urls := engines[c.d]
				want := readStream(t, ask(t, urls[0]+r.Path(), []byte(body)))
				asked := ask(t, urls[0]+r.Path(), r.Append(nil, continuation.Ask(nil, r)...))
				events := bytes.SplitAfter(asked, []byte("\n\n"))
				events = events[:len(events)-3] // usage, [DONE] and nothing
				broken, refused := 0, 0
				for k := 2; k < len(events); k++ {
					got, reason := breakStream(t, c.d, r, urls[1], events[:k])
					now := readStream(t, bytes.Join(events[:k], nil))
					state := continuation.Reason("")
					switch {
					case now.calls != "":
						state = continuation.ToolCalls
					case now.thought != "" && now.text == "":
						state = continuation.Reasoning
					}
					if reason == continuation.Seam && (k < 8 || now.text == "") {
						continue // no relayed text yet, or only one letter
					}
					if reason != state {
						t.Fatalf("broken behind event %d: %q, want %q", k, reason, state)
					}
					if reason != "" {
						refused++
						continue
					}
					broken++
					result := readStream(t, got)
					result.id, want.id = "", ""
					if fmt.Sprint(result) != fmt.Sprint(want) {
						t.Errorf("broken behind event %d:\n%+v, want\n%+v", k, result, want)
					}
				}
				if broken+refused < len(events)-8 || broken < 6 {
					t.Errorf("%d of %d breaks are continued, %d refused", broken, len(events), refused)
				}
				if structured := strings.Contains(body, "<reason") || strings.Contains(body, "<tool"); structured != (refused > 0) {
					t.Errorf("%d breaks are refused", refused)
				}
			})
		}
	}
}

// breakStream relays events of a broken stream, and those of another engine that continue it.
func breakStream(t *testing.T, d tokens.Dialect, r *openai.Request, url string, events [][]byte) ([]byte, continuation.Reason) {
	t.Helper()
	tail := continuation.NewTail(d, r)
	tail.First = len(events) <= 16
	var relayed []byte
	var prompt, ids []uint32
	for i, event := range events {
		if e, ok := continuation.ReadEvent(event); ok && i >= len(events)-16 {
			tail.Events = append(tail.Events, e)
		} else if e.State == continuation.ToolCalls {
			tail.Called = true
		}
		event = bytes.Clone(event)
		if list := continuation.FindPrompt(event); list != nil {
			prompt, _ = continuation.ReadIDs(prompt, list)
			event = continuation.CutPrompt(event)
		}
		event, ids, _ = continuation.Cut(event, ids, false, anyRoom{})
		relayed = append(relayed, event...)
	}
	before := len(prompt) + len(ids)
	for _, e := range tail.Events {
		before -= len(e.IDs)
	}
	all := append(append([]uint32{}, prompt...), ids...)
	meet, reason, err := tail.Find(func(n int) (string, error) {
		end := before
		for _, e := range tail.Events[:n] {
			end += len(e.IDs)
		}
		// 4 tokens before the tail, from the end of a letter on
		from := max(0, before-4)
		if from >= len(prompt) {
			from = len(prompt) // the tests' outputs are short
		}
		raw := ask(t, url+"/detokenize", fmt.Appendf(nil, `{"model":"sim","tokens":%s}`, continuation.AppendIDs(nil, all[from:end])))
		var v struct{ Prompt, Text string }
		err := json.Unmarshal(raw, &v)
		return v.Prompt + v.Text, err
	})
	if err != nil || reason != "" {
		return nil, reason
	}
	kept := len(ids) - meet.Drop
	all = all[:len(all)-meet.Drop]
	stub := new(openai.Request) // the proxy keeps no more of the request
	if err := openai.ParseRequest(r.API, continuation.Stub(nil, r), stub); err != nil {
		t.Fatal(err)
	}
	body, err := continuation.Body(nil, stub, all, kept)
	if err != nil {
		t.Fatal(err)
	}
	if r.API == openai.Chat { // the connector's part
		body = append(fmt.Appendf(body[:len(body)-1], `,"kv_transfer_params":{"prompt_token_ids":%s`, continuation.AppendIDs(nil, all)), "}}"...)
	}
	answer := ask(t, url+r.Path(), body)
	s := continuation.Splicer{Kept: int64(kept), Repeated: meet.Repeated, Drop: meet.Drop, Offset: tail.Offset(meet)}
	s.ID, _ = openai.Find(bytes.TrimPrefix(events[0], []byte("data: ")), "id")
	s.Created, _ = openai.Find(bytes.TrimPrefix(events[0], []byte("data: ")), "created")
	for i, event := range bytes.SplitAfter(answer, []byte("\n\n")) {
		if list := continuation.FindPrompt(event); i == 0 && !continuation.SameIDs(list, all) {
			t.Fatalf("the engine has the prompt %s, not %v", list, all)
		} else if list != nil {
			event = continuation.CutPrompt(event)
		}
		relayed = append(relayed, continuation.Strip(s.Append(nil, event))...)
	}
	if s.Wrong {
		t.Fatalf("the answer does not begin with %q: %s", meet.Repeated, answer)
	}
	return relayed, ""
}

// anyRoom is a continuation.Room without a limit.
type anyRoom struct{}

func (anyRoom) Grow(ids []uint32, n int) []uint32 { return slices.Grow(ids, n) }
