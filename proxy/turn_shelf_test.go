package proxy

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// TestTurnOfAnotherProcess: what one process of a fleet knew of a turn another one
// can have freed, by the prefill that it names or, where that has gone, by one that
// can; and nothing else is taken for one.
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
					c.say(streamHead)
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
				k := &keptTurn{
					params: []byte(`{"remote_host":"d0"}`), host: holder.Host, holder: holder, since: holder.Since(),
					forget: &cleanupJob{
						requestID: "r", connector: "vllm-nixl", limit: time.Second, slow: true,
						calls: []cleanupCall{{Cleanup: forget, target: prefill, holder: targetNamed("of that name")}},
					},
				}
				told := k.tell()
				got, err := w.readTurn(told)
				if err != nil {
					t.Fatal(err)
				}
				if string(got.params) != string(k.params) || got.host != k.host || got.holder != holder || !got.since.Equal(k.since) ||
					got.forget.calls[0].holder != holder || !got.forget.slow {
					t.Errorf("%+v", got)
				}
				if err := w.ForgetTurn(told); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				if legs := p.seen(); len(legs) != tt.calls || tt.calls > 0 && legs[0].body != `{"prompt":[0]}` {
					t.Errorf("prefill got %+v", legs)
				}
				if n := w.metric("pdproxy_kv_cleanups_total", "vllm-nixl", tt.how); n != 1 {
					t.Errorf("%v clean-ups are counted", n)
				}
				for n := range told.Forget {
					short := *told
					short.Forget = told.Forget[:n]
					if w.ForgetTurn(&short) == nil {
						t.Fatalf("%d of %d bytes are taken for a clean-up", n, len(told.Forget))
					}
				}
				k.forget.calls = append(k.forget.calls, k.forget.calls[0])
				if w.ForgetTurn(k.tell()) == nil {
					t.Error("two clean-ups are taken for that of a turn")
				}
			})
		})
	}
}
