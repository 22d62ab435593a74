package kvindex

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// at returns a time a number of seconds after a fixed start.
func at(seconds int) time.Time { return time.Unix(1_700_000_000+int64(seconds), 0) }

// held returns the number of leading blocks of a chain that target 0 has.
func held(x *Index, chain []Hash) int {
	out := make([]Match, 1)
	x.Match(chain, out)
	return int(out[0].Blocks())
}

// TestExpect checks how many of ten blocks are held after each sequence of calls. The TTL
// is 30 s.
func TestExpect(t *testing.T) {
	chain := chains(rand.New(rand.NewPCG(21, 22)), 1, 10)[0]
	for _, tt := range []struct {
		name  string
		tale  func(x *Index)
		want  int
		count Counts
	}{
		{"expected", func(x *Index) { x.Expect(0, chain, at(0)); x.Tend(at(29)) }, 10, Counts{}},
		{"expired", func(x *Index) { x.Expect(0, chain, at(0)); x.Tend(at(30)) }, 0, Counts{Expired: 10}},
		{"expected again in time", func(x *Index) {
			x.Expect(0, chain, at(0))
			x.Expect(0, chain[:4], at(20))
			x.Tend(at(49))
		}, 4, Counts{Expired: 6}},
		{"expires at the next Expect", func(x *Index) {
			x.Expect(0, chain[:6], at(0))
			x.Expect(0, chain[:1], at(31))
		}, 1, Counts{Expired: 6}},
		{"taken back", func(x *Index) { x.Expect(0, chain, at(0)); x.Unexpect(0, chain[3:]) }, 3, Counts{}},
		{"taken back once of twice", func(x *Index) {
			x.Expect(0, chain, at(0))
			x.Expect(0, chain, at(1))
			x.Unexpect(0, chain)
		}, 10, Counts{}},
		{"taken back twice of twice", func(x *Index) {
			x.Expect(0, chain, at(0))
			x.Expect(0, chain[:5], at(1))
			x.Unexpect(0, chain)
			x.Unexpect(0, chain)
		}, 0, Counts{}},
		{"taken back too often", func(x *Index) { x.Unexpect(0, chain); x.Expect(0, chain, at(0)) }, 10, Counts{}},
		{"expected 300 times, taken back 300 times", func(x *Index) {
			for range 300 {
				x.Expect(0, chain, at(0))
			}
			for range 300 {
				x.Unexpect(0, chain)
			}
		}, 10, Counts{}},
		{"confirmed", func(x *Index) {
			x.Expect(0, chain, at(0))
			x.Store(0, GPU, chain[:7])
			x.Unexpect(0, chain[:2])
			x.Tend(at(99))
		}, 7, Counts{Stored: 7, Expired: 3}},
		{"stored elsewhere", func(x *Index) {
			x.Expect(0, chain, at(0))
			x.Store(0, Disk, chain[:7])
			x.Tend(at(99))
		}, 7, Counts{Stored: 7, Expired: 10}},
		{"held already", func(x *Index) {
			x.Store(0, GPU, chain)
			x.Expect(0, chain, at(0))
			x.Remove(0, GPU, chain[8:])
		}, 8, Counts{Stored: 10, Removed: 2}},
		{"removed while expected", func(x *Index) {
			x.Store(0, CPU, chain)
			x.Expect(0, chain, at(0))
			x.Remove(0, CPU, chain)
		}, 10, Counts{Stored: 10, Removed: 10}},
		{"cleared", func(x *Index) {
			x.Expect(0, chain, at(0))
			x.Clear(0)
			x.Unexpect(0, chain)
			x.Tend(at(99))
		}, 0, Counts{}},
		{"more than there is room for", func(x *Index) {
			x.Limit(0, Limits{Blocks: 6})
			x.Expect(0, chain, at(0))
		}, 6, Counts{Evicted: 4}},
		{"of two prompts the older leaves", func(x *Index) {
			x.Limit(0, Limits{Blocks: 12})
			x.Expect(0, chain, at(0))
			x.Expect(0, chains(rand.New(rand.NewPCG(1, 1)), 1, 10)[0], at(0))
		}, 2, Counts{Evicted: 8}},
		{"of two prompts the one used last stays", func(x *Index) {
			x.Limit(0, Limits{Blocks: 12})
			x.Expect(0, chain, at(0))
			x.Expect(0, chains(rand.New(rand.NewPCG(1, 1)), 1, 2)[0], at(0))
			x.Expect(0, chain, at(0))
			x.Expect(0, chains(rand.New(rand.NewPCG(1, 2)), 1, 2)[0], at(0))
		}, 10, Counts{Evicted: 2}},
		{"a TTL of its own", func(x *Index) {
			x.Limit(0, Limits{TTL: time.Hour})
			x.Expect(0, chain, at(0))
			x.Tend(at(3599))
		}, 10, Counts{}},
		{"the TTL of all again", func(x *Index) {
			x.Limit(0, Limits{TTL: time.Hour})
			x.Limit(0, Limits{})
			x.Expect(0, chain, at(0))
			x.Tend(at(30))
		}, 0, Counts{Expired: 10}},
		{"no such target", func(x *Index) {
			for _, target := range []Target{1, 1 << 30} {
				x.Expect(target, chain, at(0))
				x.Unexpect(target, chain)
				x.Limit(target, Limits{})
				x.Store(target, GPU, chain)
				x.Remove(target, GPU, chain)
				x.Clear(target)
				x.Drop(target)
				if x.Held(target) != 0 || x.Counts(target) != (Counts{}) {
					t.Errorf("target %d holds something", target)
				}
			}
			x.Store(0, tiers, chain)
			x.Remove(0, tiers, chain)
		}, 0, Counts{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			x := New(Options{})
			x.Add()
			tt.tale(x)
			if got := held(x, chain); got != tt.want {
				t.Errorf("got %d blocks held, want %d", got, tt.want)
			}
			if got := x.Counts(0); got != tt.count {
				t.Errorf("counts %+v, want %+v", got, tt.count)
			}
		})
	}
}

// TestGuessesAreTheirFlags changes guesses at random and compares them with a map and
// with the flags in the index.
func TestGuessesAreTheirFlags(t *testing.T) {
	type want struct{ due, times int }
	r := rand.New(rand.NewPCG(23, 24))
	all := chains(r, 30, 40)
	x := New(Options{GuessTTL: 100 * time.Second})
	x.Add()
	guesses, exact := map[Hash]want{}, map[Hash]bool{}
	for now := range 3000 {
		chain := all[r.IntN(len(all))]
		a := r.IntN(len(chain))
		part := chain[a : a+1+r.IntN(len(chain)-a)]
		switch r.IntN(6) {
		case 0, 1:
			x.Expect(0, part, at(now))
			for h, g := range guesses {
				if g.due <= now {
					delete(guesses, h)
				}
			}
			for _, h := range part {
				if !exact[h] {
					guesses[h] = want{now + 100, min(guesses[h].times+1, expectMax)}
				}
			}
		case 2:
			x.Unexpect(0, part)
			for _, h := range part {
				if g, ok := guesses[h]; ok && g.times == 1 {
					delete(guesses, h)
				} else if ok {
					guesses[h] = want{g.due, g.times - 1}
				}
			}
		case 3:
			x.Store(0, GPU, part)
			for _, h := range part {
				exact[h] = true
				delete(guesses, h)
			}
		case 4:
			x.Remove(0, GPU, part)
			for _, h := range part {
				delete(exact, h)
			}
		case 5:
			if r.IntN(50) == 0 {
				x.Clear(0)
				clear(exact)
				clear(guesses)
			}
		}
		g := &x.at(0).guesses
		if g.len() != len(guesses) || x.Held(0) != len(guesses)+len(exact) {
			t.Fatalf("step %d: %d guesses of %d blocks, want %d of %d", now, g.len(), x.Held(0), len(guesses), len(guesses)+len(exact))
		}
		n := 0
		for node := uint32(0); n < g.len(); n++ {
			node = g.nodes[node].next
			h := g.nodes[node].hash
			if w, ok := guesses[h]; !ok || g.nodes[node].due != at(w.due).UnixMilli()<<expectBits|int64(w.times) {
				t.Fatalf("step %d: guess %x is due %d, want %+v", now, h, g.nodes[node].due, w)
			}
			if found, _ := g.find(h); found != node {
				t.Fatalf("step %d: guess %x is not found", now, h)
			}
		}
	}
}

// TestBound fills an index to its bound in every way.
func TestBound(t *testing.T) {
	r := rand.New(rand.NewPCG(25, 26))
	var prompts [][]Hash
	for range 4 {
		prompts = append(prompts, chains(r, 1, 40)[0])
	}
	t.Run("exact blocks stay, new ones are refused", func(t *testing.T) {
		x := New(Options{MaxEntries: 60})
		a, b := x.Add(), x.Add()
		x.Store(a, GPU, prompts[0])
		x.Store(b, GPU, prompts[1])
		out := make([]Match, 2)
		if x.Match(prompts[0], out); out[a].GPU != 40 {
			t.Errorf("the first prompt has %d blocks, want 40", out[a].GPU)
		}
		if x.Match(prompts[1], out); out[b].GPU != 20 || x.Counts(b).Refused != 20 {
			t.Errorf("the second has %d, %d refused, want 20 of each", out[b].GPU, x.Counts(b).Refused)
		}
		x.Store(b, CPU, prompts[1][:20]) // a second tier of the same block needs no room
		x.Expect(b, prompts[2], at(0))
		if c := x.Counts(b); c.Refused != 60 || c.Stored != 40 {
			t.Errorf("x.Counts(b) = %+v", c)
		}
		x.Remove(a, GPU, prompts[0][30:])
		x.Store(b, GPU, prompts[1])
		if x.Match(prompts[1], out); out[b].GPU != 30 {
			t.Errorf("with room for ten more: %d blocks, want 30", out[b].GPU)
		}
	})
	t.Run("guesses make way, those of the target with most first", func(t *testing.T) {
		x := New(Options{MaxEntries: 100})
		a, b := x.Add(), x.Add()
		x.Expect(a, prompts[0], at(0))
		x.Expect(b, prompts[1][:20], at(0))
		x.Store(b, GPU, prompts[2])
		if n := x.Held(a) + x.Held(b); n != 100 {
			t.Errorf("got %d blocks held, want 100", n)
		}
		x.Store(b, GPU, prompts[3][:1])
		if got := x.Counts(a).Evicted; got == 0 || x.Counts(b).Evicted != 0 {
			t.Errorf("evicted: %d of the target with most guesses, %d of the other", got, x.Counts(b).Evicted)
		}
		if got, want := held(x, prompts[0]), 40-int(x.Counts(a).Evicted); got != want {
			t.Errorf("got %d remaining blocks of the beginning of the prompt, want %d", got, want)
		}
	})
	t.Run("blocks of targets that left make way", func(t *testing.T) {
		x := New(Options{MaxEntries: 80})
		a, b := x.Add(), x.Add()
		x.Store(a, GPU, prompts[0])
		x.Store(b, GPU, prompts[1])
		x.Drop(a)
		x.Store(b, GPU, prompts[2])
		if n := x.Held(b); n != 80 || x.Counts(b).Refused != 0 {
			t.Errorf("got %d blocks held, %d refused, want 80 and 0", n, x.Counts(b).Refused)
		}
	})
	t.Run("a feed's chain ends where room does", func(t *testing.T) {
		x := New(Options{MaxEntries: 5})
		e := newEngine(x, x.Add(), 4)
		p := make([]uint32, 40)
		e.feed.Stored(e.stored(p, 0, 4, GPU))
		e.feed.Stored(e.stored(p, 4, 8, GPU))
		e.feed.Stored(e.stored(p, 8, 10, GPU))
		if c := x.Counts(0); c.Stored != 5 || c.Refused != 3 || c.Orphans != 2 {
			t.Errorf("x.Counts(0) = %+v", c)
		}
		if n := x.at(0).engine.n; n != 5 {
			t.Errorf("the feed has %d blocks, want 5", n)
		}
	})
}

// TestMemoryComesBack drops a large target and checks that the tables shrink.
func TestMemoryComesBack(t *testing.T) {
	x := New(Options{})
	empty := x.Stats().Bytes
	r := rand.New(rand.NewPCG(27, 28))
	blocks := make([]Hash, 200_000)
	for i := range blocks {
		blocks[i] = Hash(r.Uint64() & hashMask)
	}
	x.Store(x.Add(), GPU, blocks)
	s := x.Stats()
	if s.Blocks != len(blocks) || s.Entries != len(blocks) {
		t.Errorf("got %d blocks and %d pairs, want %d of each", s.Blocks, s.Entries, len(blocks))
	}
	if perPair := float64(s.Bytes-empty) / float64(len(blocks)); perPair < 9 || perPair > 14 {
		t.Errorf("%.1f bytes a pair", perPair)
	}
	x.Drop(0)
	if s = x.Stats(); s.Entries != 0 || s.Blocks == 0 {
		t.Errorf("before the sweep: %d pairs, %d blocks", s.Entries, s.Blocks)
	}
	x.Tend(at(0))
	if s = x.Stats(); s.Blocks != 0 || s.Bytes-empty > int64(len(blocks)) {
		t.Errorf("after the sweep: %d blocks, %d bytes more than the empty index", s.Blocks, s.Bytes-empty)
	}
}

// TestHashMapIsAMap compares the hash map with a Go map.
func TestHashMapIsAMap(t *testing.T) {
	r := rand.New(rand.NewPCG(29, 30))
	var m hashMap
	want := map[uint64]uint64{}
	for range 60_000 {
		key := r.Uint64N(3000)
		if r.IntN(2) == 0 {
			m.remove(key)
			delete(want, key)
		} else {
			value := 1 + r.Uint64N(1<<60)
			m.set(key, value)
			want[key] = value
		}
	}
	var keys []uint64
	for key := range uint64(3000) {
		if got := m.get(key); got != want[key] {
			t.Fatalf("key %d: %d, want %d", key, got, want[key])
		}
		if want[key] != 0 {
			keys = append(keys, key)
		}
	}
	if m.n != len(want) {
		t.Errorf("got %d keys, want %d", m.n, len(want))
	}
	for _, key := range slices.Backward(keys) {
		m.remove(key)
	}
	if m.n != 0 || m.get(keys[0]) != 0 {
		t.Errorf("%d keys remain", m.n)
	}
}

// TestGuessesWithEqualKeys changes guesses of blocks that differ only outside the keys of the
// table.
func TestGuessesWithEqualKeys(t *testing.T) {
	inverse := uint64(1) // of mixer, by Newton's method: each step doubles the number of right bits
	for range 6 {
		inverse *= 2 - mixer*inverse
	}
	var blocks []Hash
	for i := range uint64(3 * chunk) {
		blocks = append(blocks, Hash((7<<placeBits|i)*inverse))
	}
	var g guesses
	for i, h := range blocks {
		if keyOfGuess(h) != 7 {
			t.Fatalf("block %d has the key %d", i, keyOfGuess(h))
		}
		g.add(h, int64(i))
	}
	oldest := make([]Hash, chunk)
	g.oldest(oldest)
	for i, h := range oldest {
		if h != blocks[i] {
			t.Errorf("the oldest block %d is %x, want %x", i, h, blocks[i])
		}
		g.remove(h)
	}
	for i, h := range blocks {
		if node, _ := g.find(h); (node != 0) != (i >= chunk) || node != 0 && g.nodes[node].hash != h {
			t.Errorf("block %d has the node %d after the removal of the first %d", i, node, chunk)
		}
	}
}
