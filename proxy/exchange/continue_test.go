package exchange_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

const (
	sampled = `{"model":"m","prompt":"x","max_tokens":9,"stream":true}`
	// noContent is the first event of a chat, which has the ids of the prompt.
	noContent = `data: {"id":"1","choices":[{"index":0,"delta":{"role":"assistant","content":""}}],"prompt_token_ids":[1,2]}` + "\n\n"
)

// keptEvent is an event of vLLM's completions.
func keptEvent(text, prompt string, id int) string {
	if prompt != "" {
		prompt = `,"prompt_token_ids":[` + prompt + `]`
	}
	return fmt.Sprintf(`data: {"id":"1","choices":[{"index":0,"text":%q,"finish_reason":null%s,"token_ids":[%d]}]}`+"\n\n", text, prompt, id)
}

// keptEngines are two engines of vLLM. The first stream is that of broken, the next one continues it.
func keptEngines(broken func(c *world.Conn)) []*world.Engine {
	streams := 0
	serve := func(c *world.Conn, _ int) {
		switch {
		case c.Leg.Path == openai.Detokenize.Path():
			c.JSON(200, `{"prompt":"x a"}`)
		case streams == 0:
			streams++
			broken(c)
		default:
			c.Stream(keptEvent(" b", "1,2,3", 4), world.Done)
		}
	}
	const vllm = `"owned_by":"vllm"`
	return []*world.Engine{{Name: "a", Cards: vllm, Serve: serve}, {Name: "b", Cards: vllm, Serve: serve}}
}

// TestWithheldErrorEvent: an engine's error event waits until another engine goes on. One above 64 KiB
// ends the stream: the client gets it as the engine sent it.
func TestWithheldErrorEvent(t *testing.T) {
	for _, tt := range []struct {
		name      string
		length    int
		full      bool // no memory is left
		continued bool
	}{
		{"short", 10, false, true},
		{"60 KiB", 60 << 10, false, true},
		{"70 KiB", 70 << 10, false, false},
		{"2 MiB", 2 << 20, false, false},
		{"without memory", 10 << 10, true, false},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			event := `data: {"error":{"message":"` + strings.Repeat("n", tt.length) + `","code":500}}` + "\n\n"
			var w *world.World
			taken := int64(0)
			w = world.New(t, world.Setup{Engines: keptEngines(func(c *world.Conn) {
				c.Send(world.StreamHead)
				c.Chunks(keptEvent(" a", "1,2", 3))
				if tt.full {
					c.Chunks(event[:len(event)-1])
					taken = w.Memory.Limit() - w.Memory.Used() - 20<<10 // room for the scanner
					w.Memory.Take(taken)
					c.Chunks("\n" + world.Done)
				} else {
					c.Chunks(event, world.Done)
				}
				c.Send("0\r\n\r\n")
			})})
			a := w.Post(world.CompletionsPath, sampled)
			if tt.continued {
				if strings.Contains(a.Body, "error") || !strings.Contains(a.Body, `" b"`) || !strings.HasSuffix(a.Body, world.Done) {
					t.Errorf("got %.600s", a.Body)
				}
			} else if !strings.HasSuffix(a.Body, event+world.Done) || strings.Contains(a.Body, `" b"`) || w.Metric("pdproxy_continuations_total", "refused") != 1 {
				t.Errorf("got %.300s ... %.300s", a.Body, a.Body[max(0, len(a.Body)-300):])
			}
			w.Memory.Release(taken)
			if n := w.Memory.Used(); n != 0 {
				t.Errorf("%d bytes are counted at the end", n)
			}
		})
	}
}

// TestKeptOfFailedLeg: a leg that fails before its content frees what it has kept.
func TestKeptOfFailedLeg(t *testing.T) {
	world.Run(t, "", func(t *testing.T) {
		served := 0
		serve := func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			c.Chunks(noContent)
			if served++; served < 3 {
				c.HangUp()
				return
			}
			c.Chunks(`data: {"id":"1","choices":[{"index":0,"delta":{"content":"a"},"token_ids":[3]}]}`+"\n\n", world.Done)
			c.Send("0\r\n\r\n")
		}
		engine := func(name string) *world.Engine {
			return &world.Engine{Name: name, Cards: `"owned_by":"vllm"`, Serve: serve}
		}
		w := world.New(t, world.Setup{Engines: []*world.Engine{engine("a"), engine("b"), engine("c")}})
		a := w.Post("/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true}`)
		if served != 3 || strings.Contains(a.Body, "token_ids") || !strings.HasSuffix(a.Body, world.Done) {
			t.Errorf("%d streams: %s", served, a.Body)
		}
		if n := w.Memory.Used(); n != 0 {
			t.Errorf("%d bytes are counted at the end", n)
		}
	})
}

// TestContinuedWithoutMemory: a stream ends with the reason memory if there is no room for the request
// that continues it, and the proxy asks no engine.
func TestContinuedWithoutMemory(t *testing.T) {
	world.Run(t, "", func(t *testing.T) {
		var w *world.World
		taken := int64(0)
		prompt := strings.TrimSuffix(strings.Repeat("12,", 50_000), ",")
		engines := keptEngines(func(c *world.Conn) {
			c.Send(world.StreamHead)
			c.Chunks(keptEvent(" a", prompt, 3), keptEvent(" a", "", 4))
			taken = w.Memory.Limit() - w.Memory.Used() - 20<<10 // the first leg frees 256 KiB: enough for the ids as numbers, not for the request too
			w.Memory.Take(taken)
			c.HangUp()
		})
		w = world.New(t, world.Setup{Engines: engines})
		a := w.Post(world.CompletionsPath, sampled)
		if !strings.Contains(a.Body, `"not_continued":"memory"`) || w.Metric("pdproxy_continuations_total", "memory") != 1 {
			t.Errorf("got %.600s", a.Body)
		}
		w.Memory.Release(taken)
		if n := w.Memory.Used(); n != 0 {
			t.Errorf("%d bytes are counted at the end", n)
		}
	})
}
