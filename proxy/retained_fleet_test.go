package proxy

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// TestTurnOfAnotherProcess: one process of a fleet has the record of a turn's KV, and another
// process frees the KV. The call goes to the prefill engine that the clean-up names. If that engine
// has gone, the call goes to another suitable one. No other bytes decode as such a clean-up.
func TestTurnOfAnotherProcess(t *testing.T) {
	for _, tt := range []struct {
		name, prefill string
		bidirectional bool
		how           string
		calls         int
	}{
		{"by the same prefill", "p0", true, "forget_turn", 1},
		{"by another prefill", "gone", true, "forget_turn", 1},
		{"by nobody", "gone", false, "engine_timeout", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := &fakeEngine{name: "p0", role: "prefill", connector: "vllm-nixl", bidirectional: tt.bidirectional, serve: func(c *engineConn, _ int) {
					c.send(streamHead)
					c.chunks(`data: {"choices":[{"text":"x"}]}` + "\n\n")
					c.hold()
				}}
				d := &fakeEngine{name: "d0", role: "decode", connector: "vllm-nixl"}
				w := newWorld(t, setup{engines: []*fakeEngine{p, d}})
				holder := engine.Target{Instance: w.registry.Snapshot().Instance("d0")}
				prefill := targetNamed(tt.prefill)
				if known := w.registry.Snapshot().Instance(tt.prefill); known != nil {
					prefill.Instance = known
				}
				forget := connector.Cleanup{
					Phase: abi.Prefill, Until: connector.UntilEvent, How: "forget_turn",
					Leg: connector.Leg{Path: "/v1/completions", Body: []byte(`{"prompt":[0]}`)},
				}
				job := cleanup.Retained(cleanup.Job{RequestID: "r", Connector: "vllm-nixl", Limit: time.Second}, forget, prefill, targetNamed("of that name"))
				told := &fleet.RetainedKV{
					Holder: holder, Since: holder.Since(), Host: holder.Host, Params: []byte(`{"remote_host":"d0"}`), Forget: job.Append(nil),
				}
				if err := w.ForgetTurn(told); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				if legs := p.seen(); len(legs) != tt.calls || tt.calls > 0 && legs[0].body != `{"prompt":[0]}` {
					t.Errorf("prefill got %+v", legs)
				}
				if n := w.metric("pdproxy_kv_cleanups_total", "vllm-nixl", tt.how); n != 1 {
					t.Errorf("got %v counted clean-ups", n)
				}
				for n := range told.Forget {
					short := *told
					short.Forget = told.Forget[:n]
					if w.ForgetTurn(&short) == nil {
						t.Fatalf("the first %d of %d bytes decode as a clean-up", n, len(told.Forget))
					}
				}
				job.Add([]connector.Cleanup{forget}, prefill, holder)
				told.Forget = job.Append(nil)
				if w.ForgetTurn(told) == nil {
					t.Error("two joined clean-ups decode as that of a turn")
				}
			})
		})
	}
}
