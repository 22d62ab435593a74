package attempt_test

import (
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// TestTransferTimesOut: after prefill's answer decode must begin its answer within
// timeouts.transfer. A new pair has timeouts.handshake more. A protocol in which prefill
// may answer early has timeouts.deferred_write more. The failure counts for both engines,
// because either may have caused it.
func TestTransferTimesOut(t *testing.T) {
	for _, tt := range []struct {
		connector, answer string
		fresh, known      time.Duration
	}{
		{"vllm-nixl", world.NIXLAnswer, 3 * time.Second, 2 * time.Second},
		{"vllm-moriio", `{"kv_transfer_params":{}}`, 7 * time.Second, 6 * time.Second},
		{"sglang", world.DoneAnswer, 3 * time.Second, 2 * time.Second},
		{"trtllm", world.TRTAnswer, 3 * time.Second, 2 * time.Second},
	} {
		world.Run(t, tt.connector, func(t *testing.T) {
			var mu sync.Mutex
			hang := true
			hangs := func(yes bool) {
				mu.Lock()
				defer mu.Unlock()
				hang = yes
			}
			w := world.New(t, world.Setup{
				Config: func(c *config.Config) {
					c.Timeouts.Handshake, c.Timeouts.Transfer = config.Duration(time.Second), config.Duration(2*time.Second)
					c.Timeouts.DeferredWrite = config.Duration(4 * time.Second)
					c.Retry.Attempts = 1
				},
				Engines: []*world.Engine{
					{Name: "p", Role: "prefill", Connector: tt.connector, Serve: func(c *world.Conn, _ int) {
						if c.Leg.Path != "/abort_request" {
							time.Sleep(5 * time.Second) // the time of prefill does not count
						}
						c.JSON(200, tt.answer)
					}},
					{Name: "d", Role: "decode", Connector: tt.connector, Serve: func(c *world.Conn, _ int) {
						mu.Lock()
						hung := hang
						mu.Unlock()
						switch {
						case c.Leg.Path == "/abort_request":
							c.JSON(200, "{}")
							return
						case hung:
							c.Hold()
							return
						}
						if tt.connector == "vllm-moriio" || tt.connector == "sglang" {
							time.Sleep(5 * time.Second) // until prefill has answered
						}
						time.Sleep(time.Second)
						c.Stream("data: "+world.DoneAnswer+"\n\n", "data: [DONE]\n\n")
					}},
				},
			})
			spent := func(status int) time.Duration {
				t.Helper()
				began := time.Now()
				if a := w.Post(world.CompletionsPath, world.Completions(true)); a.Status != status || status == 504 && !strings.Contains(a.Body, "decode") {
					t.Errorf("got status %d: %s", a.Status, a.Body)
				}
				return time.Since(began) - 5*time.Second
			}
			pair := func() engine.PairRow { return w.Registry.Pairs()[0] }
			if got := spent(504); got != tt.fresh {
				t.Errorf("limit of a fresh pair: got %v, want %v", got, tt.fresh)
			}
			if p := pair(); p.Failures != 1 || p.LastError != "kv_timeout" || p.State != "unknown" {
				t.Errorf("pair %+v", p)
			}
			hangs(false)
			spent(200)
			if p := pair(); p.State != "ready" {
				t.Errorf("pair %+v", p)
			}
			hangs(true)
			if got := spent(504); got != tt.known {
				t.Errorf("limit of a known pair: got %v, want %v", got, tt.known)
			}
			if n := w.Metric("pdproxy_leg_errors_total", "decode", "kv_timeout"); n != 2 {
				t.Errorf("got %v counted legs", n)
			}
			time.Sleep(time.Minute) // clean-ups
		})
	}
}

// A decode engine of vllm-moriio-read does not renew the lease of prefill's blocks. If a
// stream has not begun at the end of the lease, decode may read other data, so the proxy
// retries the request. A nixl decode renews the lease, so its stream may begin later.
func TestStreamBeginsAfterTheLease(t *testing.T) {
	const moriioAnswer = `{"choices":[{"text":"x","finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true,` +
		`"remote_block_ids":[1],"remote_engine_id":"10.0.0.5:6301","remote_host":"10.0.0.5","remote_handshake_port":6301,"remote_notify_port":61005}}`
	for _, tt := range []struct {
		connector, answer string
		retries           float64
	}{
		{"vllm-nixl", world.NIXLAnswer, 0},
		{"vllm-moriio-read", moriioAnswer, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			begin := func(c *world.Conn, nth int) {
				if nth == 1 { // waits in the queue of the engine
					time.Sleep(5 * time.Second)
				}
				c.Stream("data: "+world.DoneAnswer+"\n\n", "data: [DONE]\n\n")
			}
			w := world.New(t, world.Setup{Engines: []*world.Engine{
				{Name: "p", Role: "prefill", Connector: tt.connector, KVLease: 4 * time.Second, Serve: func(c *world.Conn, _ int) { c.JSON(200, tt.answer) }},
				{Name: "d", Role: "decode", Connector: tt.connector, Serve: begin},
			}})
			if a := w.Post(world.CompletionsPath, world.Completions(true)); a.Status != 200 {
				t.Errorf("%s: got status %d: %s", tt.connector, a.Status, a.Body)
			}
			if n := w.Metric("pdproxy_retries_total", "decode"); n != tt.retries {
				t.Errorf("%s: got %v retries, want %v", tt.connector, n, tt.retries)
			}
			time.Sleep(time.Minute) // clean-ups
		})
	}
}

// Decode opens its answer when it has the KV. If its parser then hides the text for longer than
// timeouts.transfer, the KV is not late, however prefill and decode work together.
func TestHiddenTextIsNoLateKV(t *testing.T) {
	for _, tt := range []struct{ connector, answer string }{
		{"sglang", world.DoneAnswer},
		{"vllm-moriio", `{"kv_transfer_params":{}}`},
		{"vllm-nixl", world.NIXLAnswer},
		{"trtllm", world.TRTAnswer},
	} {
		world.Run(t, tt.connector, func(t *testing.T) {
			const stream = "data: " + world.DoneAnswer + "\n\n" + world.Done
			w := world.New(t, world.Setup{
				Config: func(c *config.Config) {
					c.Timeouts.Handshake, c.Timeouts.Transfer, c.Timeouts.DeferredWrite = config.Duration(time.Second), config.Duration(2*time.Second), config.Duration(time.Second)
					c.Retry.Attempts = 1
				},
				Engines: []*world.Engine{
					{Name: "p", Role: "prefill", Connector: tt.connector, Serve: func(c *world.Conn, _ int) {
						if c.Leg.Path != "/abort_request" {
							time.Sleep(time.Second)
						}
						c.JSON(200, tt.answer)
					}},
					{Name: "d", Role: "decode", Connector: tt.connector, Serve: world.Aborting(func(c *world.Conn, _ int) {
						time.Sleep(1500 * time.Millisecond)
						c.Send(world.StreamHead)
						c.Chunks(world.Opening)
						time.Sleep(20 * time.Second)
						c.Chunks(stream)
						c.Send("0\r\n\r\n")
					})},
				},
			})
			if a := w.Post(world.CompletionsPath, world.Completions(true)); a.Status != 200 || a.Body != world.Opening+stream {
				t.Errorf("got status %d: %q", a.Status, a.Body)
			}
			if p := w.Registry.Pairs()[0]; p.Failures != 0 || p.State != "ready" {
				t.Errorf("pair %+v", p)
			}
			time.Sleep(time.Minute) // clean-ups
		})
	}
}

// The trial of a broken pair limits a prefill leg only if prefill waits for decode. A prefill leg
// before decode computes as long as any other.
func TestTrialOfPrefillFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := world.New(t, world.Setup{
			Config: func(c *config.Config) {
				c.Timeouts.Handshake = config.Duration(2 * time.Second)
				c.Circuit.Failures, c.Circuit.OpenFor = 1, config.Duration(time.Second)
				c.Retry.Attempts = 1
			},
			Engines: []*world.Engine{
				{Name: "p", Role: "prefill", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) {
					time.Sleep(10 * time.Second)
					c.JSON(200, world.NIXLAnswer)
				}},
				{Name: "d", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, nth int) {
					if nth == 1 {
						c.JSON(500, "{}")
						return
					}
					c.Stream("data: "+world.DoneAnswer+"\n\n", world.Done)
				}},
			},
		})
		if a := w.Post(world.CompletionsPath, world.Completions(true)); a.Status != 502 {
			t.Errorf("got status %d: %q", a.Status, a.Body)
		}
		time.Sleep(5 * time.Second)
		if p := w.Registry.Pairs()[0]; p.Failures != 1 {
			t.Errorf("pair %+v", p)
		}
		if a := w.Post(world.CompletionsPath, world.Completions(true)); a.Status != 200 {
			t.Errorf("trial: got status %d: %q", a.Status, a.Body)
		}
		if p := w.Registry.Pairs()[0]; p.State != "ready" {
			t.Errorf("pair %+v", p)
		}
		time.Sleep(time.Minute) // clean-ups
	})
}

// A decode engine that has opened its answer has read the KV. If the client leaves then, or the
// engine hangs or dies, no clean-up names blocks that prefill has freed, and the pair is not at fault.
func TestOpenedAnswerHasReadTheKV(t *testing.T) {
	for _, tt := range []struct{ connector, answer string }{
		{"vllm-nixl", strings.Replace(world.NIXLAnswer, `"remote_port"`, `"remote_request_id":"r","remote_port"`, 1)},
		{"vllm-moriio", `{"kv_transfer_params":{}}`},
		{"trtllm", world.TRTAnswer},
	} {
		for _, end := range []string{"client leaves", "decode hangs", "decode dies"} {
			world.Run(t, tt.connector+" "+end, func(t *testing.T) {
				cleanups := 0
				prefill := func(c *world.Conn, _ int) {
					if strings.HasSuffix(c.Leg.Header.Get("X-Request-Id"), "-cleanup") {
						cleanups++
					}
					c.JSON(200, tt.answer)
				}
				w := world.New(t, world.Setup{
					Config: func(c *config.Config) { c.Retry.Attempts = 1; c.Timeouts.StreamIdle = config.Duration(5 * time.Second) },
					Engines: []*world.Engine{
						{Name: "p", Role: "prefill", Connector: tt.connector, Serve: prefill},
						{Name: "d", Role: "decode", Connector: tt.connector, Serve: func(c *world.Conn, nth int) {
							if nth > 1 {
								prefill(c, nth)
								return
							}
							time.Sleep(time.Second)
							c.Send(world.StreamHead)
							c.Chunks(world.Opening)
							if end == "decode dies" {
								time.Sleep(time.Second)
								c.HangUp()
								return
							}
							c.Hold()
						}},
					},
				})
				conn, err := w.Public.Dial()
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				world.WriteRequest(t, conn, world.Completions(true))
				time.Sleep(2 * time.Second)
				if end == "client leaves" {
					conn.Close()
				}
				time.Sleep(time.Minute)
				if n := w.Metric("pdproxy_kv_cleanups_total", "engine_timeout"); n != 0 || cleanups != 0 {
					t.Errorf("%v blocks until the time-out, %d clean-ups", n, cleanups)
				}
				if p := w.Registry.Pairs()[0]; p.Failures != 0 {
					t.Errorf("pair %+v", p)
				}
			})
		}
	}
}
