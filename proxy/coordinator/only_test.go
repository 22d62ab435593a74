package coordinator_test

import (
	"context"
	"errors"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
)

// TestPlaceOnly: the placement uses exactly the two given targets, whatever the
// policies want. It fails if one of the two engines has other work.
func TestPlaceOnly(t *testing.T) {
	w := newWorld(t, "p prefill two 2", "q prefill", "d decode", "e decode")
	var asked placetest.Stub
	asked.OnPlan = func(*abi.PlanFacts) (abi.PlanAnswer, string, bool) {
		t.Error("the plan policy was called")
		return abi.PlanAnswer{}, "", false
	}
	asked.OnPlace = func(*abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
		t.Error("the place policy was called")
		return abi.PlaceDecision{}, "", false
	}
	w.SetDecider(asked)
	only := func(p string, rank int, d string) *coordinator.PlacementRequest {
		a := placetest.NewPlacementRequest()
		a.Only = coordinator.Pair{Prefill: w.Target(t, p, rank), Decode: w.Target(t, d, 0)}
		return a
	}
	p := w.Must(t, only("p", 1, "e"))
	if p.Prefill != w.Target(t, "p", 1) || p.Decode != w.Target(t, "e", 0) || p.ID == 0 || w.Open() != 1 {
		t.Errorf("placed on %s/%d and %s, id %d, %d leases", p.Prefill.Name(), p.Prefill.Rank, p.Decode.Name(), p.ID, w.Open())
	}
	for _, busy := range []*coordinator.PlacementRequest{only("p", 0, "d"), only("q", 0, "e")} { // another rank of p; decode
		var none *coordinator.NoTargetError
		if _, err := w.Place(context.Background(), busy); !errors.As(err, &none) {
			t.Errorf("a busy engine: %v", err)
		}
	}
	if w.Open() != 1 || w.LiveIDs() != 1 {
		t.Errorf("%d leases and %d ids for one placement", w.Open(), w.LiveIDs())
	}
	p.Lease.Release()
	w.BreakCircuit(t, "d")
	if _, err := w.Place(context.Background(), only("q", 0, "d")); err == nil {
		t.Error("placed on an engine whose circuit is open")
	}
	w.Must(t, only("q", 0, "e")).Lease.Release()
	w.Idle(t)
}
