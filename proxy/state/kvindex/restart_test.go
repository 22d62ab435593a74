package kvindex

import (
	"slices"
	"testing"
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
