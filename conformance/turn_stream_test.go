package conformance

import (
	"bufio"
	"context"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// naming is the first release of vLLM whose streams name the kept KV.
const naming = "0.33.0+sim"

// streamFleet is a turnFleet whose engines name the kept KV in streams.
func streamFleet(t *testing.T, change func(role string, c *enginesim.Config), more func(*config.Config)) *fleet {
	return turnFleet(t, func(role string, c *enginesim.Config) {
		if c.Version = naming; change != nil {
			change(role, c)
		}
	}, more)
}

const streamed = `,"stream":true,"stream_options":{"include_usage":true}`

// nextIDs returns the ids of a turn, those of its answer by one engine alone, and n more.
func (f *fleet) nextIDs(ids []int, more string, n int) []int {
	f.t.Helper()
	answer := idsOf(f.t, f.post(context.Background(), f.alone.URL(), "/v1/completions", completionOf(ids, `,"return_token_ids":true`+more)))
	return append(append(append([]int{}, ids...), answer...), words(n)...)
}

// conversationOf returns the body of each turn of a conversation; answered adds the answer to the last
// turn and a new question.
type conversationOf struct {
	path     string
	body     func(more string) string
	answered func(a answer)
}

// idConversation is a conversation of completions in token ids.
func idConversation(f *fleet) *conversationOf {
	ids := words(100)
	return &conversationOf{
		path: "/v1/completions", body: func(more string) string { return completionOf(ids, more) },
		answered: func(answer) { ids = f.nextIDs(ids, "", 30) },
	}
}

// textConversation is a conversation of chats in text. more has the members of each turn.
func textConversation(more string) *conversationOf {
	messages := []string{long}
	return &conversationOf{
		path: chatPath, body: func(stream string) string {
			return strings.Replace(chatTurn("c", messages...), "{", "{"+more+`"top_p":1`+stream+",", 1)
		},
		answered: func(a answer) { messages = append(messages, a.text, "go on") },
	}
}

// Each turn of a streamed conversation pulls the KV of the turn before, whether the streams could be
// continued or not. A whole answer uses the KV of a stream, and a stream that of a whole answer. The
// client sees nothing of it, and at the end nothing is held.
func TestTurnsOfStreams(t *testing.T) {
	for name, of := range map[string]func(f *fleet) *conversationOf{
		"completions": idConversation,
		"chat":        func(*fleet) *conversationOf { return textConversation("") },
		"chat with tools": func(*fleet) *conversationOf {
			return textConversation(`"tools":[{"type":"function","function":{"name":"echo"}}],`)
		},
		"chat that is not continued": func(*fleet) *conversationOf {
			return textConversation(`"presence_penalty":0.5,`)
		},
	} {
		for _, mode := range []string{config.ContinueOn, config.ContinueOff} {
			t.Run(name+"/continue "+mode, func(t *testing.T) {
				f := streamFleet(t, nil, func(c *config.Config) { c.Retry.Continue = mode })
				c := of(f)
				for turn, stream := range []string{streamed, streamed, streamed, "", streamed} {
					f.emptyPrefill()
					before, body := f.prefill[0].State().Transfers, c.body(stream)
					a := f.try(c.path, body)
					f.right(a, c.path, body)
					if strings.Contains(a.body, "remote_block_ids") || strings.Contains(a.body, `token_ids":[`) || stream != "" && !a.done {
						t.Fatalf("the client's answer: %s", a.body)
					}
					if pulls := f.prefill[0].State().Transfers - before; turn > 0 && pulls != 2 { // one pulled, one sent to decode
						t.Errorf("turn %d: %d transfers", turn, pulls)
					}
					c.answered(a)
				}
				if f.turns("kept") != 5 || f.turns("pulled") != 4 {
					t.Errorf("%v turns kept, %v pulled", f.turns("kept"), f.turns("pulled"))
				}
				for _, e := range f.engines() {
					if s := e.State(); s.StaleReads > 0 {
						t.Errorf("%s got a request for memory that no request held", e.Addr())
					}
				}
				f.allForgotten()
			})
		}
	}
}

// A client that asks for token ids gets those of its stream.
func TestTurnLeavesAskedIDsOfAStream(t *testing.T) {
	f := streamFleet(t, nil, nil)
	for path, body := range map[string]string{
		"/v1/completions": completionOf(words(40), `,"return_token_ids":true,"stream":true`),
		chatPath:          strings.Replace(chat(long, 9, true), "{", `{"return_token_ids":true,`, 1),
	} {
		a := f.try(path, body)
		f.right(a, path, body)
		alone := f.post(context.Background(), f.alone.URL(), path, body)
		if strings.Count(a.body, `token_ids":[`) != strings.Count(alone.body, `token_ids":[`) || strings.Contains(a.body, "remote_block_ids") {
			t.Errorf("%s", a.body)
		}
	}
	if f.turns("kept") != 2 {
		t.Errorf("%v turns kept", f.turns("kept"))
	}
	f.allForgotten()
}

// A stream of an engine that names no KV: the proxy can neither use nor free the KV, and decode frees it
// after its own time. KV of streams without token ids is freed.
func TestTurnOfAStreamWithoutIDs(t *testing.T) {
	messages := `{"model":"sim","messages":[{"role":"user","content":"once upon a time"}],"max_tokens":9`
	response := `{"model":"sim","input":"once upon a time","max_output_tokens":9,"ignore_eos":true`
	for _, tt := range []struct{ name, version, path, body, reason string }{
		{"chat", "0.32.0", chatPath, chat(long, 9, true), "stream"},
		{"completion", "0.32.0", "/v1/completions", completionOf(words(50), streamed), "stream"},
		{"response", "0.32.0", "/v1/responses", response + `,"stream":true}`, "no_token_ids"},
		{"response, newer", naming, "/v1/responses", response + `,"stream":true}`, "no_token_ids"},
		{"whole response", naming, "/v1/responses", response + "}", "no_token_ids"},
		{"messages", naming, "/v1/messages", messages + `,"stream":true}`, "stream"},
		{"whole messages", naming, "/v1/messages", messages + "}", "no_token_ids"},
		{"tokens", naming, "/inference/v1/generate", generateOf(words(50), `,"stream":true`), "stream"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := turnFleet(t, func(_ string, c *enginesim.Config) {
				if c.Version = tt.version; tt.reason == "stream" {
					c.Nixl.KeepFor = 100 * time.Millisecond
				}
			}, nil)
			a := f.try(tt.path, tt.body)
			f.right(a, tt.path, tt.body)
			if strings.Contains(a.body, "remote_block_ids") || strings.Contains(a.body, `prompt_token_ids":[`) {
				t.Errorf("the client's answer: %s", a.body)
			}
			f.eventually("the KV is freed", func() bool { return f.kept() == 0 })
			expired := f.decode[0].State().LeasesExpired + f.decode[1].State().LeasesExpired
			if f.unusedTurns(tt.reason) != 1 || f.turns("kept") != 0 || (expired == 1) != (tt.reason == "stream") {
				t.Errorf("%v turns are not used, %v kept, %d ended by their time", f.unusedTurns(tt.reason), f.turns("kept"), expired)
			}
		})
	}
}

// Streams that leave no KV, or whose KV no later turn could use.
func TestTurnOfAStreamThatIsNotKept(t *testing.T) {
	ids := words(100)
	for _, tt := range []struct {
		name, more, reason string
		tokens             int // retry.continue_tokens
	}{
		{"a stop string", `,"stop":[" "]`, "", 1 << 10},
		{"several answers", `,"n":2`, "", 1 << 10},
		{"an answer above the limit", "", "too_long", 110},
		{"a prompt above the limit", "", "no_token_ids", 50},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := streamFleet(t, nil, func(c *config.Config) { c.Retry.ContinueTokens = tt.tokens })
			a := f.try("/v1/completions", completionOf(ids, tt.more+streamed))
			if tt.more == "" {
				f.right(a, "/v1/completions", completionOf(ids, streamed))
			}
			if !a.done || a.errors > 0 || strings.Contains(a.body, "remote_block_ids") || strings.Contains(a.body, `token_ids":[`) {
				t.Errorf("the client's answer: %s", a.body)
			}
			f.eventually("nothing is kept", func() bool { return f.kept() == 0 })
			if n := f.unusedTurns(tt.reason); f.turns("kept") != 0 || tt.reason != "" && n != 1 {
				t.Errorf("%v turns kept, %v not used", f.turns("kept"), n)
			}
		})
	}
}

// A stream breaks off. Behind its finish reason, its KV is the next turn's. Before, another engine goes
// on, and retains the KV of the prompt, of the text that the client had, and of its own text.
func TestTurnOfABrokenStream(t *testing.T) {
	for _, tt := range []struct {
		name, mode string
		after      int // events
		how        string
		legs       int // of decode
		kept       bool
	}{
		{"before the end", config.ContinueOn, 7, cutOff, 2, true},
		{"before the end, not continued", config.ContinueOff, 7, cutOff, 1, false},
		{"before the end, in an event", config.ContinueOn, 9, midEvent, 2, true},
		{"behind the finish reason", config.ContinueOn, 20, cutOff, 1, true},
		{"behind the usage", config.ContinueOn, 21, noClosing, 1, true},
		{"behind the finish reason, not continued", config.ContinueOff, 20, cutOff, 1, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f, b := startBroken(t, enginesim.ConnectorVLLMNixl, true, fleetOptions{
				prefill: 1, decode: 2, workers: manyWorkers,
				engine: func(role string, _ int, c *enginesim.Config) {
					if keepTurns(role, c); role != enginesim.RoleBoth {
						c.Version = naming
					}
					if role == enginesim.RoleDecode { // so that it has not finished when the stream breaks
						c.DecodeUsPerToken = 10_000
					}
				},
				config: func(c *config.Config) {
					c.Retry.Continue = tt.mode
					for i := range c.Engines {
						c.Engines[i].Bidirectional = true
					}
				},
			})
			ids := words(100)
			b.plan(breakage{tt.after, tt.how})
			a := f.try("/v1/completions", completionOf(ids, streamed))
			if tt.mode == config.ContinueOn {
				f.right(a, "/v1/completions", completionOf(ids, streamed))
			}
			b.mu.Lock()
			legs := b.streams
			b.mu.Unlock()
			blocks := 0
			if tt.kept {
				blocks = (100 + 19 + 15) / 16
			}
			f.eventually("the KV of the stream is kept once", func() bool { return f.kept() == blocks })
			if legs != tt.legs || strings.Contains(a.body, "remote_block_ids") {
				t.Errorf("%d legs, %s", legs, a.body)
			}
			f.emptyPrefill()
			next := completionOf(f.nextIDs(ids, "", 30), streamed)
			f.right(f.try("/v1/completions", next), "/v1/completions", next)
			if pulled := f.turns("pulled"); (pulled == 1) != tt.kept {
				t.Errorf("%v pulled", pulled)
			}
			f.allForgotten()
		})
	}
}

// The client leaves inside a stream: decode aborts, and keeps nothing. It leaves behind the finish reason:
// the KV is the next turn's, because the client has the whole answer.
func TestTurnOfAStreamWhoseClientLeaves(t *testing.T) {
	for name, phase := range map[string]string{"inside": "stream", "behind the finish reason": ""} {
		t.Run(name, func(t *testing.T) {
			f := streamFleet(t, nil, nil)
			for _, d := range f.decode {
				d.SetFault("", 0, phase)
			}
			ids := words(100)
			ctx, leave := context.WithCancel(context.Background())
			defer leave()
			resp := f.openAt(ctx, "/v1/completions", completionOf(ids, streamed))
			events, seen := bufio.NewScanner(resp.Body), 0
			for events.Scan() {
				if strings.Contains(events.Text(), `"text":`) {
					seen++
				}
				if strings.Contains(events.Text(), `"finish_reason":"length"`) || phase != "" && seen == 2 {
					break
				}
			}
			leave()
			resp.Body.Close()
			f.eventually("the proxy has noticed", func() bool { return f.metric("pdproxy_leases_open") == 0 })
			if phase != "" {
				f.settled()
				if f.turns("kept") != 0 {
					t.Error("a turn is kept")
				}
				return
			}
			next := completionOf(f.nextIDs(ids, "", 30), streamed)
			f.emptyPrefill()
			f.right(f.try("/v1/completions", next), "/v1/completions", next)
			if f.turns("pulled") != 1 {
				t.Errorf("%v pulled", f.turns("pulled"))
			}
			f.allForgotten()
		})
	}
}

// Decode dies behind the end of a stream whose KV it retains: the next turn computes its prompt.
func TestTurnOfAStreamWhoseDecodeDies(t *testing.T) {
	f := streamFleet(t, nil, nil)
	ids := words(100)
	a := f.try("/v1/completions", completionOf(ids, streamed))
	f.right(a, "/v1/completions", completionOf(ids, streamed))
	next := completionOf(f.nextIDs(ids, "", 20), streamed)
	name := a.header.Get("X-Pdproxy-Decode")
	f.decode[name[1]-'0'].Kill()
	f.eventually("its death is known", func() bool { return f.engineState(name) != "ready" })
	f.awaitWorkers()
	f.right(f.try("/v1/completions", next), "/v1/completions", next)
	if f.unusedTurns("engine_gone") != 1 || f.turns("pulled") != 0 {
		t.Errorf("%v turns whose engine had left, %v pulled", f.unusedTurns("engine_gone"), f.turns("pulled"))
	}
	f.allForgotten()
}

// The proxy ends inside a stream: decode aborts, and keeps nothing.
func TestTurnOfAStreamInADrain(t *testing.T) {
	f := streamFleet(t, nil, func(c *config.Config) { c.Server.DrainTimeout = config.Duration(50 * time.Millisecond) })
	for _, d := range f.decode {
		d.SetFault("", 0, "stream")
	}
	resp := f.openAt(context.Background(), "/v1/completions", completionOf(words(100), streamed))
	f.eventually("decode answers", func() bool { return f.busy(f.decode) })
	f.drain() // its error counts the cut stream
	if a := readRest(resp); a.done && a.errors == 0 {
		t.Errorf("the stream ended well: %s", a.body)
	}
	f.eventually("nothing is kept", func() bool { return f.kept() == 0 && !f.busy(f.decode) })
}
