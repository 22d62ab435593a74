package coordinator_test

import (
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// TestDetails: a policy that needs details gets those of each of its candidates, in
// the order of the candidates, also after a retry has moved rows, for a fixed prefill
// and for kept targets. A policy without this need gets none.
func TestDetails(t *testing.T) {
	w := newWorld(t, "p0 prefill", "p1 prefill", "d0 decode", "d1 decode", "b0 both one")
	for _, i := range w.Reg.Snapshot().Instances {
		i.Load[0].Report(load.Report{At: time.Now(), Every: time.Hour, Running: int32(i.ID), Waiting: int32(i.ID) + 100}, i.Load[0].Mark())
	}
	var seen *abi.PlaceFacts
	stub := placetest.Stub{Wants: abi.NeedDetails, OnPlace: func(f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
		seen = f
		for i := range f.Candidates {
			if len(f.Details) != len(f.Candidates) {
				t.Fatalf("%d details for %d candidates", len(f.Details), len(f.Candidates))
			}
			c, d := &f.Candidates[i], &f.Details[i]
			if d.Running != int32(c.Instance) || d.Waiting != int32(c.Instance)+100 || d.Weight != 1 {
				t.Errorf("instance %d has the details %+v", c.Instance, d)
			}
		}
		return abi.PlaceDecision{}, coordinator.ReasonAbsent, false
	}}
	w.SetDecider(stub)
	w.Must(t, placetest.NewPlacementRequest()).Lease.Release()
	for name, change := range map[string]func(a *coordinator.PlacementRequest){
		"retry": func(a *coordinator.PlacementRequest) {
			a.Excluded = []engine.Target{w.Target(t, "p0", 0), w.Target(t, "d0", 0)}
		},
		"fixed prefill": func(a *coordinator.PlacementRequest) { a.Prefill = w.Target(t, "p1", 0) },
		"kept targets": func(a *coordinator.PlacementRequest) {
			a.Same.Prefill, a.Same.Decode = w.Target(t, "p1", 0), w.Target(t, "d1", 0)
		},
		"aggregated": func(a *coordinator.PlacementRequest) { a.Request.PairBroken = true },
	} {
		a := placetest.NewPlacementRequest()
		change(a)
		seen = nil
		w.Must(t, a).Lease.Release()
		if seen == nil {
			t.Errorf("%s: the policy was not called", name)
		}
	}
	stub.Wants = 0
	stub.OnPlace = func(f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
		if len(f.Details) != 0 {
			t.Errorf("%d details without the need", len(f.Details))
		}
		return abi.PlaceDecision{}, coordinator.ReasonAbsent, false
	}
	w.SetDecider(stub)
	w.Must(t, placetest.NewPlacementRequest()).Lease.Release()
	w.Idle(t)
}
