package kvindex

import (
	"testing"
	"time"
)

func TestVouched(t *testing.T) {
	x := New(Options{})
	a, b := x.Add(), x.Add()
	tokens := make([]uint32, 6*16)
	chain := AppendTokens(nil, Seed("m", "", ""), tokens, 16)
	x.Store(a, GPU, chain[:2])
	x.Store(a, Disk, chain[2:3])
	x.Store(a, CPU, chain[4:])
	x.Expect(a, chain, time.Unix(1, 0))
	x.Expect(b, chain, time.Unix(1, 0))
	if got := x.Vouched(a, chain); got != 3 {
		t.Errorf("got %d blocks, want 3: the fourth is only expected", got)
	}
	if got := x.Vouched(b, chain); got != 0 {
		t.Errorf("got %d blocks of a target without events", got)
	}
	if got := x.Vouched(a, chain[4:]); got != 2 {
		t.Errorf("got %d blocks, want all 2", got)
	}
	before := x.Stats().Entries
	x.Clear(a)
	if got := x.Vouched(a, chain); got != 0 || x.Vouched(99, chain) != 0 {
		t.Errorf("%d blocks of a target that was cleared", got)
	}
	if x.Stats().Entries > before {
		t.Error("looking adds entries")
	}
}
