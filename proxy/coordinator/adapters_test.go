package coordinator_test

import (
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// TestAdapters: the candidates of a request for a LoRA adapter have the state of the adapter in
// their engine's last report, as long as the report counts. Without a report, and for a request
// for the base model, the state is unknown. No need is necessary.
func TestAdapters(t *testing.T) {
	w := newWorld(t, "lorap prefill", "lorad decode", "loraq prefill", "loranone prefill", "other prefill")
	report := func(name string, age time.Duration, a load.Adapters) {
		c := &w.Reg.Snapshot().Instance(name).Load[0]
		c.Report(load.Report{At: time.Now().Add(-age), Every: time.Hour, Adapters: a}, c.Mark())
	}
	report("lorap", 0, load.NewAdapters("chat,sql", "", 4))
	report("lorad", 0, load.NewAdapters("chat", "sql", 1))
	report("loraq", 0, load.NewAdapters("chat", "", 1))
	var seen map[uint32]abi.AdapterState
	known := false
	w.SetDecider(placetest.Stub{OnPlace: func(f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
		seen, known = map[uint32]abi.AdapterState{}, f.Adapters
		for i := range f.Candidates {
			seen[f.Candidates[i].Instance] = f.Candidates[i].Adapter
		}
		return abi.PlaceDecision{}, coordinator.ReasonAbsent, false
	}})
	check := func(model string, want map[string]abi.AdapterState) {
		t.Helper()
		a := placetest.NewPlacementRequest()
		a.Model = model
		w.Must(t, a).Lease.Release()
		if len(seen) != len(want) {
			t.Errorf("%s: candidates %v, want %d", model, seen, len(want))
		}
		any := false
		for name, state := range want {
			any = any || state != abi.AdapterUnknown
			if got := seen[w.Reg.Snapshot().Instance(name).ID]; got != state {
				t.Errorf("%s: %s is %v, want %v", model, name, got, state)
			}
		}
		if known != any {
			t.Errorf("%s: Adapters is %v", model, known)
		}
	}
	check("sql", map[string]abi.AdapterState{"lorap": abi.AdapterRunning, "lorad": abi.AdapterWaiting, "loraq": abi.AdapterFull, "loranone": abi.AdapterUnknown})
	check("m", map[string]abi.AdapterState{"lorap": 0, "lorad": 0, "loraq": 0, "loranone": 0, "other": 0})
	for _, name := range []string{"lorap", "lorad", "loraq"} {
		report(name, 10*time.Hour, load.NewAdapters("sql", "", 4))
	}
	check("sql", map[string]abi.AdapterState{"lorap": 0, "lorad": 0, "loraq": 0, "loranone": 0})
	w.Idle(t)
}
