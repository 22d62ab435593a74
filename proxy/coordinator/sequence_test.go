package coordinator_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
)

// TestSequencesOfTwoModels: with round_robin, requests of two models and of one or two
// legs alternate. They use all targets equally.
func TestSequencesOfTwoModels(t *testing.T) {
	w := newWorld(t, "a=a both two 2", "b=b both two 2", "p=c prefill two 2", "d=c decode two 2", "e=c both two 2")
	w.SetDecider(placetest.Builtin(t, "auto", "round_robin"))
	hits := map[string]int{}
	for i := range 240 {
		a := placetest.NewPlacementRequest()
		a.Model = []string{"a", "b", "c", "c"}[i%4]
		if i%4 == 3 {
			a.Aggregate = abi.RoleBoth
		}
		p := w.Must(t, a)
		if p.Facts.Request.Model != a.Model {
			t.Fatalf("model %q is shown as %q", a.Model, p.Facts.Request.Model)
		}
		hits[p.Flow.String()+" "+p.Decode.Name()+" "+string(rune('0'+p.Decode.Rank))]++
		p.Lease.Release()
		p.Recycle()
	}
	for target, want := range map[string]int{
		"aggregated a=a 0": 30, "aggregated a=a 1": 30, "aggregated b=b 0": 30, "aggregated b=b 1": 30,
		"aggregated p=c 0": 10, "aggregated p=c 1": 10, "aggregated d=c 0": 10, "aggregated d=c 1": 10,
		"aggregated e=c 0": 10, "aggregated e=c 1": 10,
	} {
		if hits[target] != want {
			t.Errorf("%s: %d placements, want %d", target, hits[target], want)
		}
	}
	// Half of the pairs prefill on e, whose decode is d's; the others use all.
	for target, want := range map[string]float64{"d=c 0": 22.5, "d=c 1": 22.5, "e=c 0": 7.5, "e=c 1": 7.5} {
		if n := float64(hits["concurrent "+target]); n < want-1 || n > want+1 {
			t.Errorf("decode on %s: %v of 60 placements, want %v", target, n, want)
		}
	}
	w.Idle(t)
}

// TestSequencesAreForgotten: the table removes the counters of a model that no instance
// serves any more. The counters of other models stay.
func TestSequencesAreForgotten(t *testing.T) {
	w := newWorld(t, "a=a both", "b=b both")
	s := w.Reg.Snapshot()
	pool, _ := s.Pool("a")
	var table coordinator.SequenceTable
	a := table.Of(pool, s)
	table.Add("gone")
	pool, _ = s.Pool("b")
	table.Of(pool, s)
	pool, _ = s.Pool("a")
	if models := table.Models(); !slices.Equal(models, []string{"a", "b"}) || table.Of(pool, s) != a {
		t.Errorf("models %v", models)
	}
}

// TestEachPlacementDraws: each placement gets another random number.
func TestEachPlacementDraws(t *testing.T) {
	w := newWorld(t, "b both")
	seen := map[uint64]bool{}
	for i := range uint64(50) {
		p := w.Must(t, placetest.NewPlacementRequest())
		if p.Facts.Sequence != i || seen[p.Facts.Random] {
			t.Fatalf("placement %d: sequence %d, random %d", i, p.Facts.Sequence, p.Facts.Random)
		}
		seen[p.Facts.Random] = true
		p.Lease.Release()
	}
}

// TestSequencesOfTwoSubsets: with round_robin, requests that may use different engines of one
// model alternate. They use all engines equally.
func TestSequencesOfTwoSubsets(t *testing.T) {
	w := newWorld(t, "a both", "b both", "c both", "d both", "p prefill", "q prefill", "x decode", "y decode")
	w.SetDecider(placetest.Builtin(t, "auto", "round_robin"))
	hits := map[string]int{}
	for i := range 80 {
		a := placetest.NewPlacementRequest()
		switch i % 4 {
		case 0:
			a.Aggregate, a.Within.Whole = abi.RoleBoth, w.instances(t, "a", "b")
		case 1:
			a.Aggregate, a.Within.Whole = abi.RoleBoth, w.instances(t, "c", "d")
		case 2:
			a.Two, a.Within = true, coordinator.Within{Prefill: w.instances(t, "p"), Decode: w.instances(t, "x", "y")}
		default:
			a.Two, a.Within = true, coordinator.Within{Prefill: w.instances(t, "p", "q"), Decode: w.instances(t, "y")}
		}
		p := w.Must(t, a)
		name := p.Decode.Name()
		if i%4 > 1 {
			name = p.Prefill.Name() + name
		}
		hits[fmt.Sprint(i%4, name)]++
		p.Lease.Release()
		p.Recycle()
	}
	for target, want := range map[string]int{"0a": 10, "0b": 10, "1c": 10, "1d": 10, "2px": 10, "2py": 10, "3py": 10, "3qy": 10} {
		if hits[target] != want {
			t.Errorf("%s: %d placements, want %d", target, hits[target], want)
		}
	}
	w.Idle(t)
}
