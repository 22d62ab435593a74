package coordinator_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// TestKnownPairs: the policy gets every known pair of its rows, and no other, with several groups,
// ranks, roles and a kept prefill target.
func TestKnownPairs(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for round := range 20 {
		var specs []string
		for k := range 12 {
			specs = append(specs, fmt.Sprintf("e%dx%d %s two %d", k, 1+k%3, []string{"prefill", "decode", "both"}[r.IntN(3)], 1+r.IntN(3)))
		}
		w := newWorld(t, append(specs, "p0x1 prefill", "d0x1 decode")...)
		var targets []engine.Target
		for _, i := range w.Reg.Snapshot().Instances {
			for rank := range i.Load {
				targets = append(targets, engine.Target{Instance: i, Rank: rank})
			}
		}
		for range 40 {
			pair := w.Reg.Pair(targets[r.IntN(len(targets))], targets[r.IntN(len(targets))])
			if r.IntN(4) > 0 {
				pair.Success()
			}
		}
		var facts *abi.PlaceFacts
		w.SetDecider(placetest.Stub{Wants: abi.NeedPairs, OnPlace: func(f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
			facts = f
			return abi.PlaceDecision{}, "absent", false
		}})
		a := placetest.NewPlacementRequest()
		a.Two = true
		if round%2 == 1 {
			a.Prefill = w.Target(t, "p0x1", 0)
			a.Prefill.Pin()
		}
		p := w.Must(t, a)
		want := map[[2]int32]abi.PairState{}
		for i, c := range facts.Candidates {
			for j, d := range facts.Candidates {
				state := w.Reg.PairState(p.Targets[i], p.Targets[j])
				if i != j && c.Roles&abi.RolePrefill != 0 && d.Roles&abi.RoleDecode != 0 && c.Group == d.Group && state != abi.PairUnknown {
					want[[2]int32{int32(i), int32(j)}] = state
				}
			}
		}
		for _, pair := range facts.Pairs {
			if key := [2]int32{pair.Prefill, pair.Decode}; want[key] != pair.State {
				t.Errorf("round %d: pair %v has state %v, want %v", round, key, pair.State, want[key])
			}
		}
		if len(facts.Pairs) != len(want) {
			t.Errorf("round %d: %d pairs, want %d", round, len(facts.Pairs), len(want))
		}
		p.Lease.Release()
	}
}
