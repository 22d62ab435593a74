package kvindex

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
)

// TestMatchWhileOthersWrite: writers move words and records as often as possible. Readers
// match chains that some targets hold during the whole test. A reader must never miss a
// block of such a target, and must never find a chain at a target that never got it.
func TestMatchWhileOthersWrite(t *testing.T) {
	for _, tt := range []struct {
		name             string
		targets, writers int
		segments         uint64
	}{
		{"lists", 8, 4, 1},
		{"sets", 40, 4, 1},
		{"wide sets", 200, 3, 2},
		{"all segments", 16, 4, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			all := chains(rand.New(rand.NewPCG(3, 4)), 24, 60)
			if tt.segments > 0 {
				crowded(all, tt.segments)
			}
			x := New(Options{})
			for range tt.targets {
				x.Add()
			}
			// Target 0 holds all chains, target 1 none, and target 2 half of them.
			for i, chain := range all {
				x.Store(0, GPU, chain)
				if i%2 == 0 {
					x.Store(2, CPU, chain)
				}
			}
			var writers, readers sync.WaitGroup
			stop := make(chan struct{})
			for i := range tt.writers {
				writers.Go(func() {
					r := rand.New(rand.NewPCG(5, uint64(i)))
					for step := range 400 {
						writeAny(x, r, Target(3+r.IntN(tt.targets-3)), all[r.IntN(len(all))], step)
					}
				})
			}
			for i := range 2 {
				readers.Go(func() {
					r := rand.New(rand.NewPCG(6, uint64(i)))
					out := make([]Match, tt.targets)
					for {
						select {
						case <-stop:
							return
						default:
						}
						k := r.IntN(len(all))
						n := uint32(len(all[k]))
						x.Match(all[k], out)
						if out[0] != (Match{GPU: n}) || out[1] != (Match{}) || k%2 == 0 && out[2] != (Match{CPU: n}) {
							t.Errorf("chain %d of %d blocks: %+v", k, n, out[:3])
							return
						}
					}
				})
			}
			writers.Wait()
			close(stop)
			readers.Wait()
		})
	}
}

// writeAny makes one random change at a target.
func writeAny(x *Index, r *rand.Rand, t Target, chain []Hash, step int) {
	a := r.IntN(len(chain))
	part := chain[a : a+1+r.IntN(len(chain)-a)]
	now := time.Unix(int64(step), 0)
	switch r.IntN(12) {
	case 0:
		x.Clear(t)
	case 1, 2, 3:
		x.Remove(t, Tier(r.IntN(3)), part)
	case 4:
		x.Expect(t, part, now)
	case 5:
		x.Unexpect(t, part)
	case 6:
		if r.IntN(20) == 0 {
			x.Tend(now)
			x.Stats()
		}
	default:
		x.Store(t, Tier(r.IntN(3)), part)
	}
}

// TestClearWhileStoring: a target restarts while its feed and other feeds store blocks.
// After Clear, and before the next store, no block of the target is found.
func TestClearWhileStoring(t *testing.T) {
	all := chains(rand.New(rand.NewPCG(7, 8)), 16, 40)
	crowded(all, 1)
	x := New(Options{})
	for range 6 {
		x.Add()
	}
	var others sync.WaitGroup
	stop := make(chan struct{})
	for i := range 3 {
		others.Go(func() {
			r := rand.New(rand.NewPCG(9, uint64(i)))
			for step := 0; ; step++ {
				select {
				case <-stop:
					return
				default:
					writeAny(x, r, Target(1+r.IntN(5)), all[r.IntN(len(all))], step)
				}
			}
		})
	}
	out := make([]Match, 6)
	for i := range 400 {
		chain := all[i%len(all)]
		x.Store(0, GPU, chain)
		if x.Match(chain, out); out[0].GPU != uint32(len(chain)) {
			t.Errorf("round %d: %+v after Store, want %d", i, out[0], len(chain))
		}
		if i%3 == 0 {
			x.Drop(0)
			if got := x.Add(); got != 0 {
				t.Errorf("round %d: Add = %d, want the free slot 0", i, got)
			}
		} else {
			x.Clear(0)
		}
		if x.Match(chain, out); out[0] != (Match{}) {
			t.Errorf("round %d: %+v after Clear", i, out[0])
		}
		if n := x.Held(0); n != 0 {
			t.Errorf("round %d: %d blocks held after Clear", i, n)
		}
	}
	close(stop)
	others.Wait()
	for target := range Target(6) {
		x.Clear(target)
	}
	x.Tend(time.Unix(0, 0))
	if s := x.Stats(); s.Blocks != 0 || s.Entries != 0 || x.entries.Load() != 0 {
		t.Errorf("%d blocks and %d pairs remain", s.Blocks, x.entries.Load())
	}
}

// TestMatchAllocatesNothing: Match allocates no memory, also with wide bit sets.
func TestMatchAllocatesNothing(t *testing.T) {
	for _, targets := range []int{3, 64, 1024} {
		x := New(Options{})
		chain := chains(rand.New(rand.NewPCG(1, 1)), 1, 300)[0]
		for range targets {
			x.Store(x.Add(), GPU, chain)
		}
		out := make([]Match, x.Targets())
		if n := testing.AllocsPerRun(50, func() { x.Match(chain, out) }); n >= 1 && !raceEnabled {
			t.Errorf("%d targets: %v allocations", targets, n)
		}
		if slices.ContainsFunc(out, func(m Match) bool { return m.GPU != 300 }) {
			t.Errorf("%d targets: %+v", targets, out[:3])
		}
	}
}
