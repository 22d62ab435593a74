package proxy

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// TestCleanUp: what another process owed its engines is done here, on the engines
// of those names.
func TestCleanUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &fakeEngine{name: "p0", role: "prefill", connector: "vllm-nixl", serve: prefillAnswers}
		d := &fakeEngine{name: "d0", role: "decode", connector: "vllm-nixl", key: "secret", serve: func(c *engineConn, _ int) { c.json(200, unary) }}
		w := newWorld(t, setup{engines: []*fakeEngine{p, d}})
		target := func(name string) engine.Target { return engine.Target{Instance: w.registry.Snapshot().Instance(name)} }
		call := connector.Cleanup{
			Phase: abi.Decode, AnyTarget: true, Until: connector.UntilHead, How: "abort_decode",
			Leg: connector.Leg{Path: "/v1/completions", Header: []connector.Field{{Name: "X-Request-Id", Value: "leg-cleanup"}}, Body: []byte(`{"prompt":[0]}`)},
		}
		job := &cleanupJob{requestID: "r", connector: "vllm-nixl", limit: time.Second, calls: []cleanupCall{{Cleanup: call, target: target("d0"), holder: target("p0")}}}
		owed := job.owed()
		if err := w.CleanUp(owed); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if legs := d.seen(); len(legs) != 1 || legs[0].path != "/v1/completions" || legs[0].body != `{"prompt":[0]}` ||
			legs[0].header.Get("X-Request-Id") != "leg-cleanup" || legs[0].header.Get("Authorization") != "Bearer secret" {
			t.Errorf("decode got %+v", legs)
		}
		if n := w.metric("pdproxy_kv_cleanups_total", "vllm-nixl", "abort_decode"); n != 1 {
			t.Errorf("%v clean-ups", n)
		}

		for name, owed := range map[string]string{
			"garbage":            "{",
			"an engine unknown":  strings.Replace(string(owed), `"d0"`, `"d9"`, 1),
			"a rank too many":    strings.Replace(string(owed), `"d0","Rank":0`, `"d0","Rank":1`, 1),
			"a rank that is not": strings.Replace(string(owed), `"p0","Rank":0`, `"p0","Rank":-1`, 1),
		} {
			if err := w.CleanUp([]byte(owed)); err == nil {
				t.Errorf("%s: no error", name)
			}
		}
		call.Leg.Body = make([]byte, maxOwed)
		job.calls[0].Cleanup = call
		if job.owed() != nil {
			t.Error("a prompt is told beforehand")
		}
	})
}

func FuzzCleanUp(f *testing.F) {
	f.Add([]byte(`{"RequestID":"r","Connector":"c","Limit":1,"Calls":[{"Phase":1,"Leg":{"Path":"/x"},"Target":{"Engine":"e","Rank":0},"Holder":{"Engine":"e"}}]}`))
	s := &Server{deps: Deps{Registry: engine.New(engine.Options{})}}
	f.Fuzz(func(t *testing.T, owed []byte) {
		_ = s.CleanUp(owed) // no engine is known: nothing may be called
	})
}
