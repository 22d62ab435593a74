package kvindex

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// TestLeaps: if targets hold only prefixes, in each tier, leaps give the same result as
// the model.
func TestLeaps(t *testing.T) {
	steps := 150
	if testing.Short() {
		steps = 40
	}
	for _, targets := range []int{1, 3, 64, 300} {
		r := rand.New(rand.NewPCG(2, uint64(targets)))
		all := chains(r, 12, 600)
		x, m := New(Options{}), &model{}
		for range targets {
			x.Add()
			m.held = append(m.held, map[Hash]uint64{})
		}
		out, want := make([]Match, targets), make([]Match, targets)
		for step := range steps {
			chain, id := all[r.IntN(len(all))], Target(r.IntN(targets))
			x.Clear(id)
			clear(m.held[id])
			for tier := range Tier(tiers) {
				part := chain[:r.IntN(len(chain)+1)]
				x.Store(id, tier, part)
				m.change(id, 1<<tier, part, true)
			}
			chain = all[r.IntN(len(all))]
			chain = chain[:len(chain)-r.IntN(stride+1)]
			x.matchLeaping(chain, out)
			if m.match(chain, want); !slices.Equal(out, want) {
				t.Fatalf("%d targets, step %d: %s", targets, step, differ(out, want))
			}
			x.Match(chain, out)
			if !slices.Equal(out, want) {
				t.Fatalf("%d targets, step %d: %s", targets, step, differ(out, want))
			}
		}
		if x.cautious.Load() != 0 {
			t.Errorf("%d targets: a hole was found where none is", targets)
		}
	}
}

// TestHoles: a hole that a leap skips is detected. Then matches make no leaps until a
// number of matches has shown no hole.
func TestHoles(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	chain := chains(r, 1, 800)[0]
	x, out := New(Options{}), make([]Match, 2)
	whole, holed := x.Add(), x.Add()
	x.Store(whole, GPU, chain)
	x.Store(holed, GPU, chain)
	x.Remove(holed, GPU, chain[402:404]) // neither of the two blocks is the end of a group
	x.Remove(holed, GPU, chain[700:])
	for range checkEvery {
		x.Match(chain, out)
	}
	if want := []Match{{GPU: 800}, {GPU: 402}}; !slices.Equal(out, want) || x.cautious.Load() == 0 {
		t.Fatalf("a hole is not seen: %+v", out)
	}
	x.Store(holed, GPU, chain[402:404])
	for range waryFor + 2*checkEvery {
		x.Match(chain, out)
	}
	if want := []Match{{GPU: 800}, {GPU: 700}}; !slices.Equal(out, want) || x.cautious.Load() > 0 {
		t.Errorf("%+v, and %d matches more are made in full", out, x.cautious.Load())
	}
}
