package attempt_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
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
		world.Run(t, tt.name, func(t *testing.T) {
			p := &world.Engine{Name: "p0", Role: "prefill", Connector: "vllm-nixl", Bidirectional: tt.bidirectional, Serve: func(c *world.Conn, _ int) {
				c.Send(world.StreamHead)
				c.Chunks(`data: {"choices":[{"text":"x"}]}` + "\n\n")
				c.Hold()
			}}
			d := &world.Engine{Name: "d0", Role: "decode", Connector: "vllm-nixl"}
			w := world.New(t, world.Setup{Engines: []*world.Engine{p, d}})
			holder := engine.Target{Instance: w.Registry.Snapshot().Instance("d0")}
			prefill := targetNamed(tt.prefill)
			if known := w.Registry.Snapshot().Instance(tt.prefill); known != nil {
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
			if legs := p.Seen(); len(legs) != tt.calls || tt.calls > 0 && legs[0].Body != `{"prompt":[0]}` {
				t.Errorf("prefill got %+v", legs)
			}
			if n := w.Metric("pdproxy_kv_cleanups_total", "vllm-nixl", tt.how); n != 1 {
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
	}
}

func targetNamed(name string) engine.Target {
	return engine.Target{Instance: &engine.Instance{Spec: config.Engine{Name: name}}}
}
