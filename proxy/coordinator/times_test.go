package coordinator_test

import (
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// TestPredictions: a policy that needs predictions gets those of its candidates once
// enough legs have finished; failed legs teach nothing; a policy without the need gets
// none.
func TestPredictions(t *testing.T) {
	w := newWorld(t, "p0 prefill", "p1 prefill", "d0 decode")
	var seen []abi.Prediction
	stub := placetest.Stub{Wants: abi.NeedPredictions, OnPlace: func(f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
		seen = append(seen[:0], f.Predictions...)
		if len(seen) != len(f.Candidates) {
			t.Fatalf("%d predictions for %d candidates", len(seen), len(f.Candidates))
		}
		return abi.PlaceDecision{}, coordinator.ReasonAbsent, false
	}}
	w.SetDecider(stub)
	for range 40 {
		w.Must(t, placetest.NewPlacementRequest()).Lease.Release()
	}
	if p := w.Must(t, placetest.NewPlacementRequest()); seen[0] != (abi.Prediction{}) || len(p.Notes) != 0 {
		t.Errorf("predictions %+v, notes %q before the first leg has finished", seen, p.Notes)
	} else {
		p.Lease.Release()
	}
	for range 40 {
		p := w.Must(t, placetest.NewPlacementRequest())
		p.Lease.PrefillDoneAfter(100 * time.Millisecond)
		p.Lease.AnsweredAfter(120 * time.Millisecond)
		w.Reg.MeasureOutput(p.Decode, 10, 100*time.Millisecond)
		p.Lease.Release()
	}
	a := placetest.NewPlacementRequest()
	a.Excluded = []engine.Target{w.Target(t, "p0", 0)} // rows move
	p := w.Must(t, a)
	for i, c := range p.Facts.Candidates {
		s := seen[i]
		if c.Roles == abi.RolePrefill && (s.Prefill < 90e3 || s.Prefill > 110e3 || s.Token != 0) ||
			c.Roles == abi.RoleDecode && (s.Start < 18e3 || s.Start > 22e3 || s.Token < 6e3 || s.Token > 11e3 || s.Prefill != 0) {
			t.Errorf("row %d of role %v has the prediction %+v", i, c.Roles, s)
		}
	}
	if len(p.Notes) != 1 || !strings.HasPrefix(p.Notes[0], "predicted: first token after 1") {
		t.Errorf("notes %q", p.Notes)
	}
	p.Lease.Release()
	stub.Wants = 0
	stub.OnPlace = func(f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
		if len(f.Predictions) != 0 {
			t.Errorf("%d predictions without the need", len(f.Predictions))
		}
		return abi.PlaceDecision{}, coordinator.ReasonAbsent, false
	}
	w.SetDecider(stub)
	w.Must(t, placetest.NewPlacementRequest()).Lease.Release()
	w.Idle(t)
}
