package proxy

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// Decode opens its answer when it has the KV. If its parser then hides the text for longer than
// timeouts.transfer, the KV is not late, however prefill and decode work together.
func TestHiddenTextIsNoLateKV(t *testing.T) {
	for _, tt := range []struct{ connector, answer string }{
		{"sglang", doneAnswer},
		{"vllm-moriio", `{"kv_transfer_params":{}}`},
		{"vllm-nixl", nixlAnswer},
		{"trtllm", trtAnswer},
	} {
		t.Run(tt.connector, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const stream = "data: " + doneAnswer + "\n\n" + done
				w := newWorld(t, setup{
					config: func(c *config.Config) {
						c.Timeouts.Handshake, c.Timeouts.Transfer, c.Timeouts.DeferredWrite = config.Duration(time.Second), config.Duration(2*time.Second), config.Duration(time.Second)
						c.Retry.Attempts = 1
					},
					engines: []*fakeEngine{
						{name: "p", role: "prefill", connector: tt.connector, serve: func(c *engineConn, _ int) {
							if c.leg.path != "/abort_request" {
								time.Sleep(time.Second)
							}
							c.json(200, tt.answer)
						}},
						{name: "d", role: "decode", connector: tt.connector, serve: func(c *engineConn, _ int) {
							if c.leg.path == "/abort_request" {
								c.json(200, "{}")
								return
							}
							time.Sleep(1500 * time.Millisecond)
							c.send(streamHead)
							c.chunks(opening)
							time.Sleep(20 * time.Second)
							c.chunks(stream)
							c.send("0\r\n\r\n")
						}},
					},
				})
				if a := w.post(completionsPath, completions(true)); a.status != 200 || a.body != opening+stream {
					t.Errorf("got status %d: %q", a.status, a.body)
				}
				if p := w.registry.Pairs()[0]; p.Failures != 0 || p.State != "ready" {
					t.Errorf("pair %+v", p)
				}
				time.Sleep(time.Minute) // clean-ups
			})
		})
	}
}

// The trial of a broken pair limits a prefill leg only if prefill waits for decode. A prefill leg
// before decode computes as long as any other.
func TestTrialOfPrefillFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{
			config: func(c *config.Config) {
				c.Timeouts.Handshake = config.Duration(2 * time.Second)
				c.Circuit.Failures, c.Circuit.OpenFor = 1, config.Duration(time.Second)
				c.Retry.Attempts = 1
			},
			engines: []*fakeEngine{
				{name: "p", role: "prefill", connector: "vllm-nixl", serve: func(c *engineConn, _ int) {
					time.Sleep(10 * time.Second)
					c.json(200, nixlAnswer)
				}},
				{name: "d", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, nth int) {
					if nth == 1 {
						c.json(500, "{}")
						return
					}
					c.stream("data: "+doneAnswer+"\n\n", done)
				}},
			},
		})
		if a := w.post(completionsPath, completions(true)); a.status != 502 {
			t.Errorf("got status %d: %q", a.status, a.body)
		}
		time.Sleep(5 * time.Second)
		if p := w.registry.Pairs()[0]; p.Failures != 1 {
			t.Errorf("pair %+v", p)
		}
		if a := w.post(completionsPath, completions(true)); a.status != 200 {
			t.Errorf("trial: got status %d: %q", a.status, a.body)
		}
		if p := w.registry.Pairs()[0]; p.State != "ready" {
			t.Errorf("pair %+v", p)
		}
		time.Sleep(time.Minute) // clean-ups
	})
}

// A decode engine that has opened its answer has read the KV. If the client leaves then, or the
// engine hangs or dies, no clean-up names blocks that prefill has freed, and the pair is not at fault.
func TestOpenedAnswerHasReadTheKV(t *testing.T) {
	for _, tt := range []struct{ connector, answer string }{
		{"vllm-nixl", strings.Replace(nixlAnswer, `"remote_port"`, `"remote_request_id":"r","remote_port"`, 1)},
		{"vllm-moriio", `{"kv_transfer_params":{}}`},
		{"trtllm", trtAnswer},
	} {
		for _, end := range []string{"client leaves", "decode hangs", "decode dies"} {
			t.Run(tt.connector+" "+end, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					cleanups := 0
					prefill := func(c *engineConn, _ int) {
						if strings.HasSuffix(c.leg.header.Get("X-Request-Id"), "-cleanup") {
							cleanups++
						}
						c.json(200, tt.answer)
					}
					w := newWorld(t, setup{
						config: func(c *config.Config) { c.Retry.Attempts = 1; c.Timeouts.StreamIdle = config.Duration(5 * time.Second) },
						engines: []*fakeEngine{
							{name: "p", role: "prefill", connector: tt.connector, serve: prefill},
							{name: "d", role: "decode", connector: tt.connector, serve: func(c *engineConn, nth int) {
								if nth > 1 {
									prefill(c, nth)
									return
								}
								time.Sleep(time.Second)
								c.send(streamHead)
								c.chunks(opening)
								if end == "decode dies" {
									time.Sleep(time.Second)
									c.hangUp()
									return
								}
								c.hold()
							}},
						},
					})
					conn, err := w.public.Dial()
					if err != nil {
						t.Fatal(err)
					}
					defer conn.Close()
					writeRequest(t, conn, completions(true))
					time.Sleep(2 * time.Second)
					if end == "client leaves" {
						conn.Close()
					}
					time.Sleep(time.Minute)
					if n := w.metric("pdproxy_kv_cleanups_total", "engine_timeout"); n != 0 || cleanups != 0 {
						t.Errorf("%v blocks until the time-out, %d clean-ups", n, cleanups)
					}
					if p := w.registry.Pairs()[0]; p.Failures != 0 {
						t.Errorf("pair %+v", p)
					}
				})
			})
		}
	}
}
