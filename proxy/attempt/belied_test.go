package attempt_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// SGLang's decode engine may generate from KV that prefill never computed. If prefill then answers
// with an error, the client must not take decode's answer for right, whether it has begun or is
// complete. The decode engines of vLLM generate only after the whole transfer.
func TestPrefillBeliesDecode(t *testing.T) {
	const abort = `{"choices":[{"text":"","finish_reason":"abort"}]}`
	verdicts := map[string]func(*world.Conn){
		"good":  func(c *world.Conn) { c.JSON(200, world.DoneAnswer) },
		"400":   func(c *world.Conn) { c.JSON(400, `{"object":"error","message":"too long","code":400}`) },
		"500":   func(c *world.Conn) { c.JSON(500, "{}") },
		"abort": func(c *world.Conn) { c.JSON(200, abort) },
	}
	for verdict, answer := range verdicts {
		for _, tt := range []struct {
			name, connector string
			stream          bool
			ends            time.Duration // when decode ends its answer
			wrong           bool          // the verdict belies the answer
		}{
			{"a stream goes on", "sglang", true, time.Hour, true},
			{"a stream ends before the verdict", "sglang", true, time.Second, true},
			{"a whole answer", "sglang", false, time.Second, true},
			{"a stream of vLLM", "vllm-moriio", true, 10 * time.Second, false},
		} {
			world.Run(t, verdict+" "+tt.name, func(t *testing.T) {
				w := world.New(t, world.Setup{Engines: []*world.Engine{
					{Name: "p", Role: "prefill", Connector: tt.connector, Serve: world.Aborting(func(c *world.Conn, _ int) {
						time.Sleep(3 * time.Second)
						answer(c)
					})},
					{Name: "d", Role: "decode", Connector: tt.connector, Serve: world.Aborting(func(c *world.Conn, _ int) {
						if !tt.stream {
							time.Sleep(tt.ends)
							c.JSON(200, world.DoneAnswer)
							return
						}
						c.Send(world.StreamHead)
						for start := time.Now(); time.Since(start) < tt.ends && time.Since(start) < time.Minute; time.Sleep(time.Second) {
							c.Chunks(world.EventA)
						}
						c.Chunks(world.EventB + world.Done)
						c.Send("0\r\n\r\n")
					})},
				}})
				a := w.Post(world.CompletionsPath, world.Completions(tt.stream))
				begun := tt.stream
				switch {
				case verdict == "good" || !tt.wrong:
					if complete := !tt.stream || strings.HasSuffix(a.Body, world.EventB+world.Done); a.Status != 200 || !complete {
						t.Errorf("got status %d: %q", a.Status, a.Body)
					}
				case begun:
					if !strings.HasPrefix(a.Body, world.EventA) || !strings.HasSuffix(a.Body, world.Broken) || strings.Contains(a.Body, world.Done) || strings.Count(a.Body, world.EventA) > 4 {
						t.Errorf("got %q", a.Body)
					}
					if n := w.Metric("pdproxy_broken_streams_total"); n != 1 {
						t.Errorf("%v broken streams", n)
					}
				default:
					if a.Status < 400 {
						t.Errorf("got status %d: %q", a.Status, a.Body)
					}
				}
				time.Sleep(time.Minute) // clean-ups
				if n := w.Metric("pdproxy_kv_cleanups_total", "abort_rid"); (n > 0) != (tt.wrong && verdict != "good") {
					t.Errorf("%v aborts", n)
				}
			})
		}
	}
}

// If prefill never answers, a complete answer of decode waits for timeouts.cleanup.
func TestVerdictThatNeverComes(t *testing.T) {
	for _, stream := range []bool{false, true} {
		world.Run(t, fmt.Sprint("stream ", stream), func(t *testing.T) {
			w := world.New(t, world.Setup{Engines: []*world.Engine{
				{Name: "p", Role: "prefill", Connector: "sglang", Serve: world.Aborting(func(c *world.Conn, _ int) {
					c.Hold()
				})},
				{Name: "d", Role: "decode", Connector: "sglang", Serve: func(c *world.Conn, _ int) {
					if !stream {
						c.JSON(200, world.DoneAnswer)
						return
					}
					c.Stream(world.EventA, world.Done)
				}},
			}})
			start := time.Now()
			a := w.Post(world.CompletionsPath, world.Completions(stream))
			if a.Status != 200 || stream && a.Body != world.EventA+world.Done || time.Since(start) > 11*time.Second {
				t.Errorf("got status %d after %v: %q", a.Status, time.Since(start), a.Body)
			}
			time.Sleep(time.Minute)
		})
	}
}
