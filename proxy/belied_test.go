package proxy

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// SGLang's decode engine may generate from KV that prefill never computed. If prefill then answers
// with an error, the client must not take decode's answer for right, whether it has begun or is
// complete. The decode engines of vLLM generate only after the whole transfer.
func TestPrefillBeliesDecode(t *testing.T) {
	const abort = `{"choices":[{"text":"","finish_reason":"abort"}]}`
	verdicts := map[string]func(*engineConn){
		"good":  func(c *engineConn) { c.json(200, doneAnswer) },
		"400":   func(c *engineConn) { c.json(400, `{"object":"error","message":"too long","code":400}`) },
		"500":   func(c *engineConn) { c.json(500, "{}") },
		"abort": func(c *engineConn) { c.json(200, abort) },
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
			t.Run(verdict+" "+tt.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t, setup{engines: []*fakeEngine{
						{name: "p", role: "prefill", connector: tt.connector, serve: func(c *engineConn, _ int) {
							if c.leg.path == "/abort_request" {
								c.json(200, "{}")
								return
							}
							time.Sleep(3 * time.Second)
							answer(c)
						}},
						{name: "d", role: "decode", connector: tt.connector, serve: func(c *engineConn, _ int) {
							if c.leg.path == "/abort_request" {
								c.json(200, "{}")
								return
							}
							if !tt.stream {
								time.Sleep(tt.ends)
								c.json(200, doneAnswer)
								return
							}
							c.send(streamHead)
							for start := time.Now(); time.Since(start) < tt.ends && time.Since(start) < time.Minute; time.Sleep(time.Second) {
								c.chunks(eventA)
							}
							c.chunks(eventB + done)
							c.send("0\r\n\r\n")
						}},
					}})
					a := w.post(completionsPath, completions(tt.stream))
					begun := tt.stream
					switch {
					case verdict == "good" || !tt.wrong:
						if complete := !tt.stream || strings.HasSuffix(a.body, eventB+done); a.status != 200 || !complete {
							t.Errorf("got status %d: %q", a.status, a.body)
						}
					case begun:
						if !strings.HasPrefix(a.body, eventA) || !strings.HasSuffix(a.body, broken) || strings.Contains(a.body, done) || strings.Count(a.body, eventA) > 4 {
							t.Errorf("got %q", a.body)
						}
						if n := w.metric("pdproxy_broken_streams_total"); n != 1 {
							t.Errorf("%v broken streams", n)
						}
					default:
						if a.status < 400 {
							t.Errorf("got status %d: %q", a.status, a.body)
						}
					}
					time.Sleep(time.Minute) // clean-ups
					if n := w.metric("pdproxy_kv_cleanups_total", "abort_rid"); (n > 0) != (tt.wrong && verdict != "good") {
						t.Errorf("%v aborts", n)
					}
				})
			})
		}
	}
}

// If prefill never answers, a complete answer of decode waits for timeouts.cleanup.
func TestVerdictThatNeverComes(t *testing.T) {
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprint("stream ", stream), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, setup{engines: []*fakeEngine{
					{name: "p", role: "prefill", connector: "sglang", serve: func(c *engineConn, _ int) {
						if c.leg.path == "/abort_request" {
							c.json(200, "{}")
							return
						}
						c.hold()
					}},
					{name: "d", role: "decode", connector: "sglang", serve: func(c *engineConn, _ int) {
						if !stream {
							c.json(200, doneAnswer)
							return
						}
						c.stream(eventA, done)
					}},
				}})
				start := time.Now()
				a := w.post(completionsPath, completions(stream))
				if a.status != 200 || stream && a.body != eventA+done || time.Since(start) > 11*time.Second {
					t.Errorf("got status %d after %v: %q", a.status, time.Since(start), a.body)
				}
				time.Sleep(time.Minute)
			})
		})
	}
}
