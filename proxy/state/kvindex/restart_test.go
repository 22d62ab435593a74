package kvindex

import (
	"slices"
	"testing"
	"time"
)

// TestMatchDuringRestart: a target that restarts during a match matches nothing, because
// the found blocks may belong to its next user.
func TestMatchDuringRestart(t *testing.T) {
	x := New(Options{})
	stays, restarts := x.Add(), x.Add()
	blocks := []Hash{8, 16, 24}
	x.Store(stays, GPU, blocks)
	x.Store(restarts, CPU, blocks)
	out := make([]Match, x.Targets())
	w := x.beginWalk(out)
	x.lookUp(w, blocks, func(at int, found *looked) { x.step(w, blocks[at:], found, uint32(at)) })
	x.Clear(restarts)
	x.endWalk(w, len(blocks))
	if want := []Match{{GPU: 3}, {}}; !slices.Equal(out, want) {
		t.Errorf("got %+v, want %+v", out, want)
	}
}

// TestNoHolderNumber: a target for which no holder number is free holds no blocks, and can be
// cleared and dropped.
func TestNoHolderNumber(t *testing.T) {
	x := New(Options{})
	full := &roster{holders: make([]*holder, noHolder)}
	for i := range full.holders {
		full.holders[i] = new(holder)
	}
	x.spare, x.gone = make([]uint64, noHolder/64), make([]uint64, noHolder/64)
	x.roster.Store(full)
	tg := x.Add()
	if id := x.targets[tg].id; id != noHolder {
		t.Fatalf("the target has the number %d", id)
	}
	x.Store(tg, GPU, []Hash{8})
	x.Clear(tg)
	x.Store(tg, GPU, []Hash{8})
	x.Expect(tg, []Hash{16}, time.Now())
	if n := x.Held(tg); n != 0 {
		t.Errorf("the target holds %d blocks", n)
	}
	x.Drop(tg)
}
