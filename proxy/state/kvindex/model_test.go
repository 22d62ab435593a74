package kvindex

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// model is an index of Go maps: for each target, the flags by block.
type model struct {
	held []map[Hash]uint64
}

func (m *model) match(blocks []Hash, out []Match) {
	clear(out)
	for t := range min(len(out), len(m.held)) {
	walk:
		for _, h := range blocks {
			switch f := m.held[t][h]; {
			case f&(flagGPU|flagGuess) != 0:
				out[t].GPU++
			case f&(1<<CPU) != 0:
				out[t].CPU++
			case f != 0:
				out[t].Disk++
			default:
				break walk
			}
		}
	}
}

func (m *model) change(t Target, flags uint64, blocks []Hash, set bool) {
	for _, h := range blocks {
		if set {
			m.held[t][h] |= flags
		} else if m.held[t][h] &^= flags; m.held[t][h] == 0 {
			delete(m.held[t], h)
		}
	}
}

func (m *model) entries() int {
	n := 0
	for _, held := range m.held {
		n += len(held)
	}
	return n
}

// chains returns prompts. Some of them have a common beginning.
func chains(r *rand.Rand, n, blocks int) [][]Hash {
	all := make([][]Hash, n)
	for i := range all {
		seed, keep := Seed("m", "", ""), []Hash(nil)
		if i > 0 && r.IntN(4) > 0 {
			from := all[r.IntN(i)]
			keep = slices.Clone(from[:1+r.IntN(len(from))])
			seed = keep[len(keep)-1]
		}
		tokens := make([]uint32, (blocks-len(keep))*4)
		for k := range tokens {
			tokens[k] = r.Uint32N(1000)
		}
		all[i] = AppendTokens(keep, seed, tokens, 4)
	}
	return all
}

// crowded moves all blocks of the chains into a few segments, so that tables often grow,
// wrap around and move words.
func crowded(all [][]Hash, segments uint64) {
	for _, chain := range all {
		for i, h := range chain {
			chain[i] = Hash(uint64(h)%segments<<segmentShift | uint64(h)>>segmentBits&^7)
		}
	}
}

// TestIndexIsItsModel makes the same random changes in an index and in a model, and
// compares the results of the same queries.
func TestIndexIsItsModel(t *testing.T) {
	for _, tt := range []struct {
		name     string
		targets  int
		segments uint64 // 0: all segments
		steps    int
	}{
		{"few targets", 4, 0, 400},
		{"few targets, one segment", 4, 1, 1500},
		{"64 targets, two segments", 64, 2, 800},
		{"300 targets, one segment", 300, 1, 500},
		{"1500 targets, one segment", 1500, 1, 400},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, uint64(tt.targets)))
			all := chains(r, 40, 50)
			if tt.segments > 0 {
				crowded(all, tt.segments)
			}
			x, m := New(Options{}), &model{}
			for i := range tt.targets {
				if got := x.Add(); got != Target(i) {
					t.Fatalf("Add = %d, want %d", got, i)
				}
				m.held = append(m.held, map[Hash]uint64{})
			}
			out, want := make([]Match, tt.targets), make([]Match, tt.targets)
			if testing.Short() {
				tt.steps /= 4
			}
			for step := range tt.steps {
				chain := all[r.IntN(len(all))]
				a := r.IntN(len(chain))
				if r.IntN(2) == 0 {
					a = 0
				}
				part := chain[a : a+1+r.IntN(len(chain)-a)]
				tier := Tier(r.IntN(3))
				first := r.IntN(tt.targets)
				for target := first; target < min(tt.targets, first+1+r.IntN(40)); target++ {
					switch id := Target(target); r.IntN(20) {
					case 0:
						x.Clear(id)
						clear(m.held[id])
					case 1, 2, 3, 4, 5, 6:
						x.Remove(id, tier, part)
						m.change(id, 1<<tier, part, false)
					default:
						x.Store(id, tier, part)
						m.change(id, 1<<tier, part, true)
					}
				}
				if r.IntN(300) == 0 {
					x.Tend(time.Unix(0, 0))
				}
				for range 3 {
					chain = all[r.IntN(len(all))]
					x.Match(chain, out)
					m.match(chain, want)
					if !slices.Equal(out, want) {
						t.Fatalf("step %d: match differs: %s", step, differ(out, want))
					}
				}
			}
			if got := x.Stats().Entries; got != m.entries() {
				t.Errorf("got %d entries, want %d", got, m.entries())
			}
			for id := range m.held {
				if got := x.Held(Target(id)); got != len(m.held[id]) {
					t.Errorf("target %d holds %d, want %d", id, got, len(m.held[id]))
				}
				x.Clear(Target(id))
			}
			x.Tend(time.Unix(0, 0))
			if s := x.Stats(); s.Entries != 0 || s.Blocks != 0 || x.entries.Load() != 0 || x.dead.Load() != 0 {
				t.Errorf("after Clear of all targets: %+v, %d pairs, %d of them dead", s, x.entries.Load(), x.dead.Load())
			}
			if n := len(x.roster.Load().holders); n > 2*tt.targets+64 {
				t.Errorf("%d holder numbers for %d targets: numbers are not reused", n, tt.targets)
			}
		})
	}
}

func differ(got, want []Match) string {
	for i := range got {
		if got[i] != want[i] {
			return fmt.Sprintf("target %d: %+v, want %+v", i, got[i], want[i])
		}
	}
	return ""
}
