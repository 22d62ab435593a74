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
