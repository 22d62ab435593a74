package coordinator_test

import (
	"context"
	"errors"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
)

// TestReserve: Reserve places one phase. The target gets the load of this phase and no
// load of the other phase. The id stays the same.
func TestReserve(t *testing.T) {
	for _, phase := range []abi.Phase{abi.Prefill, abi.Decode} {
		t.Run(phase.String(), func(t *testing.T) {
			w := newWorld(t, "p prefill", "d decode", "x both one")
			a := placetest.NewPlacementRequest()
			a.ID = 1<<40 + 5
			p, err := w.Reserve(context.Background(), a, phase)
			if err != nil {
				t.Fatal(err)
			}
			prefill, decode := &w.Target(t, "p", 0).Load[0], &w.Target(t, "d", 0).Load[0]
			want := [4]int64{100, 100, 0, 0}
			if phase == abi.Decode {
				want = [4]int64{0, 0, 110, 110}
			}
			if got := [4]int64{prefill.Tokens(), prefill.Queued(), decode.Tokens(), decode.Decode()}; got != want {
				t.Errorf("carried %v, want %v", got, want)
			}
			if w.Open() != 1 || w.LiveIDs() != 1 || p.ID != a.ID || p.Prefill.IsZero() != (phase == abi.Decode) || p.Decode.IsZero() != (phase == abi.Prefill) {
				t.Errorf("%d leases, %d ids, %+v", w.Open(), w.LiveIDs(), p)
			}
			q, err := w.Reserve(context.Background(), a, phase) // the other phase has the same id
			if err != nil || w.LiveIDs() != 1 {
				t.Errorf("%v, %d ids", err, w.LiveIDs())
			}
			q.Lease.Release()
			if w.LiveIDs() != 1 {
				t.Error("the id of an open lease is no longer in flight")
			}
			p.Lease.PrefillDone()
			p.Lease.Answered(false)
			if prefill.Tokens() != 0 {
				t.Errorf("prefill has ended, and %d tokens of its load remain", prefill.Tokens())
			}
			p.Lease.Release()
			p.Lease.Release()
			w.Idle(t)
		})
	}
}

// TestReserveWithin: Reserve uses only the allowed instances. It uses a broken instance
// only if no other is left.
func TestReserveWithin(t *testing.T) {
	w := newWorld(t, "p prefill", "q prefill", "b both", "d decode")
	seen := map[string]int{}
	for range 6 {
		a := placetest.NewPlacementRequest()
		p, err := w.Reserve(context.Background(), a, abi.Prefill)
		if err != nil {
			t.Fatal(err)
		}
		seen[p.Prefill.Name()]++
		defer p.Lease.Release()
	}
	if seen["p"] != 2 || seen["q"] != 2 || seen["b"] != 2 {
		t.Errorf("placements of prefill: %v", seen)
	}
	w.BreakCircuit(t, "q")
	a := placetest.NewPlacementRequest()
	a.Within.Prefill = w.instances(t, "q")
	p, err := w.Reserve(context.Background(), a, abi.Prefill)
	if err != nil || p.Prefill.Name() != "q" {
		t.Fatal(p, err)
	}
	p.Lease.Release()
	a.Within.Prefill = w.instances(t, "d")
	var none *coordinator.NoTargetError
	if _, err := w.Reserve(context.Background(), a, abi.Prefill); !errors.As(err, &none) || none.Phase != abi.Prefill {
		t.Errorf("w.Reserve(a, abi.Prefill) = %v", err)
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := w.Reserve(ended, a, abi.Decode); !errors.Is(err, context.Canceled) {
		t.Errorf("w.Reserve(ended, a, abi.Decode) = %v, want %v", err, context.Canceled)
	}
}

// TestReserveTurns: the two phases of a turn count as one turn.
func TestReserveTurns(t *testing.T) {
	w := newWorld(t, "p prefill", "q prefill", "d decode", "e decode")
	w.SetDecider(placetest.Builtin(t, "always", "conversation"))
	homes := map[abi.Phase]string{}
	for turn := int32(1); turn <= 3; turn++ {
		for _, phase := range []abi.Phase{abi.Prefill, abi.Decode} {
			a := placetest.NewPlacementRequest()
			a.Key.Conversation = conversation.Query{ID: "c"}
			p, err := w.Reserve(context.Background(), a, phase)
			if err != nil {
				t.Fatal(err)
			}
			if p.Turn.Number != turn {
				t.Errorf("%v of turn %d is turn %d", phase, turn, p.Turn.Number)
			}
			name := p.Prefill.Name() + p.Decode.Name()
			if turn > 1 && homes[phase] != name {
				t.Errorf("%v of turn %d on %s, before on %s", phase, turn, name, homes[phase])
			}
			homes[phase] = name
			p.Lease.Release()
		}
	}
	w.Idle(t)
}
