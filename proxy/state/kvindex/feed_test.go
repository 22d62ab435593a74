package kvindex

import (
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

// engine makes events as an engine does. It has its own hashes and stores its blocks
// under the index's hashes.
type engine struct {
	feed  *Feed
	block int
	held  map[Hash]uint64 // index's hash -> tiers, as 1<<Tier
	own   map[Hash]uint64 // index's hash -> engine's hash
}

func newEngine(x *Index, t Target, block int) *engine {
	return &engine{NewFeed(x, t, "m"), block, map[Hash]uint64{}, map[Hash]uint64{}}
}

// hash returns the engine's hash of a block. Like SGLang's hash, it is the first bytes of
// a SHA-256 over the previous hash and the tokens.
func (e *engine) hash(parent uint64, tokens []uint32) uint64 {
	b := binary.LittleEndian.AppendUint64([]byte{byte(e.block)}, parent)
	for _, id := range tokens {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	sum := sha256.Sum256(b)
	return binary.BigEndian.Uint64(sum[:])
}

// stored returns the event for the blocks from to to of a prompt.
func (e *engine) stored(tokens []uint32, from, to int, tier Tier) *Stored {
	ev := &Stored{BlockTokens: e.block, Tier: tier, HasParent: from > 0, Tokens: tokens[from*e.block : to*e.block]}
	ours := AppendTokens(nil, Seed("m", "", ""), tokens, e.block)
	var h uint64
	for i := range to {
		if i == from {
			ev.Parent = h
		}
		h = e.hash(h, tokens[i*e.block:(i+1)*e.block])
		if i >= from {
			ev.Hashes = append(ev.Hashes, h)
			e.own[ours[i]] = h
		}
	}
	return ev
}

// prompts returns random prompts of at most 40 blocks, some with a common beginning.
func prompts(r *rand.Rand, n, block int) [][]uint32 {
	all := make([][]uint32, n)
	for i := range all {
		if i > 0 {
			from := all[r.IntN(i)]
			all[i] = slices.Clone(from[:r.IntN(len(from))])
		}
		for len(all[i]) < 40*block {
			all[i] = append(all[i], r.Uint32N(100))
		}
	}
	return all
}

// TestFeedFollowsEngines: engines with different block lengths and hashes store, repeat,
// move and remove blocks, restart, and lose events before a resync. Afterwards the index
// holds the same blocks as the engines.
func TestFeedFollowsEngines(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	x := New(Options{})
	engines := []*engine{newEngine(x, x.Add(), 4), newEngine(x, x.Add(), 4), newEngine(x, x.Add(), 16)}
	all := map[int][][]uint32{4: prompts(r, 20, 4), 16: prompts(r, 20, 16)}
	out, want := make([]Match, 3), make([]Match, 3)
	for step := range 4000 {
		e := engines[r.IntN(len(engines))]
		p := all[e.block][r.IntN(20)]
		ours := AppendTokens(nil, Seed("m", "", ""), p, e.block)
		switch r.IntN(12) {
		case 0, 1, 2, 3, 4:
			// The stored blocks follow held blocks, or are already held.
			from := 0
			for from < len(ours)-1 && e.held[ours[from]] != 0 && r.IntN(8) > 0 {
				from++
			}
			to, tier := from+1+r.IntN(len(ours)-from), Tier(r.IntN(3))
			e.feed.Stored(e.stored(p, from, to, tier))
			for _, h := range ours[from:to] {
				e.held[h] |= 1 << tier
			}
		case 5, 6, 7, 8:
			tier := Tier(r.IntN(3))
			var gone []uint64
			for _, h := range ours[r.IntN(len(ours)):] {
				if e.held[h]>>tier&1 != 0 {
					gone = append(gone, e.own[h])
					e.held[h] &^= 1 << tier
				}
			}
			e.feed.Removed(tier, gone)
		case 9:
			h := ours[r.IntN(len(ours))]
			from, to := Tier(r.IntN(3)), Tier(r.IntN(3))
			if e.held[h]>>from&1 != 0 {
				e.feed.Moved(from, to, []uint64{e.own[h]})
				e.held[h] = e.held[h]&^(1<<from) | 1<<to
			}
		case 10:
			// An offload event has no tokens.
			if h := ours[r.IntN(len(ours))]; e.held[h] != 0 {
				e.feed.Stored(&Stored{Hashes: []uint64{e.own[h]}, BlockTokens: e.block, Tier: CPU})
				e.held[h] |= 1 << CPU
			}
		case 11:
			if r.IntN(10) == 0 {
				e.feed.Cleared()
				clear(e.held)
			}
		}
		maps.DeleteFunc(e.held, func(_ Hash, f uint64) bool { return f == 0 })
		m := model{held: []map[Hash]uint64{engines[0].held, engines[1].held, engines[2].held}}
		x.Match(ours, out)
		m.match(ours, want)
		if !slices.Equal(out, want) {
			t.Fatalf("step %d: %s", step, differ(out, want))
		}
		if got := x.Held(0) + x.Held(1) + x.Held(2); got != m.entries() {
			t.Fatalf("step %d: %d pairs, want %d", step, got, m.entries())
		}
	}
	if c := x.Stats().Counts; c.Orphans != 0 || c.Ignored != 0 || c.Strays != 0 || c.Refused != 0 || c.Replaced != 0 {
		t.Errorf("in a stream without gaps: %+v", c)
	}
	for i, e := range engines {
		if got := e.feed.BlockTokens(); got != e.block {
			t.Errorf("engine %d: block length %d, want %d", i, got, e.block)
		}
	}
}

// TestFeedAfterGap loses and reorders events and then starts again. The index holds the
// blocks of the new events, and no others.
func TestFeedAfterGap(t *testing.T) {
	r := rand.New(rand.NewPCG(13, 14))
	x := New(Options{})
	e := newEngine(x, x.Add(), 4)
	all := prompts(r, 10, 4)
	var events []*Stored
	for range 300 {
		p := all[r.IntN(10)]
		from := r.IntN(39)
		events = append(events, e.stored(p, from, from+1+r.IntN(39-from), Tier(r.IntN(3))))
	}
	for _, i := range r.Perm(len(events)) {
		e.feed.Stored(events[i])
		e.feed.Removed(Tier(r.IntN(3)), events[r.IntN(len(events))].Hashes)
	}
	out := make([]Match, 1)
	for _, p := range all {
		// Blocks may be missing, but no block is at a wrong position: a prompt with
		// another first block matches nothing.
		other := append([]uint32{7777}, p[1:]...)
		if x.Match(AppendTokens(nil, Seed("m", "", ""), other, 4), out); out[0] != (Match{}) {
			t.Errorf("a prompt that no request had is held: %+v", out[0])
		}
	}
	e.feed.Cleared()
	e.feed.Stored(e.stored(all[3], 0, 40, GPU))
	for i, p := range all {
		want := uint32(0)
		for int(want) < 40 && slices.Equal(p[:4*want+4], all[3][:4*want+4]) {
			want++
		}
		if x.Match(AppendTokens(nil, Seed("m", "", ""), p, 4), out); out[0] != (Match{GPU: want}) {
			t.Errorf("prompt %d: %+v, want %d blocks", i, out[0], want)
		}
	}
}

// TestFeedEvents feeds one target. It checks how many blocks, of four tokens each, of the
// prompt 1, 2, 3… the target then has, and checks the counters.
func TestFeedEvents(t *testing.T) {
	tokens := make([]uint32, 40)
	for i := range tokens {
		tokens[i] = uint32(i + 1)
	}
	first := &Stored{Hashes: []uint64{11, 12}, Tokens: tokens[:8], BlockTokens: 4}
	next := &Stored{Hashes: []uint64{13, 14}, Parent: 12, HasParent: true, Tokens: tokens[8:16], BlockTokens: 4}
	for _, tt := range []struct {
		name  string
		feed  func(f *Feed)
		want  Match
		count Counts
	}{
		{"a chain", func(f *Feed) { f.Stored(first); f.Stored(next) }, Match{GPU: 4}, Counts{Stored: 4}},
		{"told twice", func(f *Feed) { f.Stored(first); f.Stored(first) }, Match{GPU: 2}, Counts{Stored: 2}},
		{"late join", func(f *Feed) { f.Stored(next) }, Match{}, Counts{Orphans: 2}},
		{"late join, parent stored later", func(f *Feed) { f.Stored(next); f.Stored(first); f.Stored(next) },
			Match{GPU: 4}, Counts{Orphans: 2, Stored: 4}},
		{"two tiers", func(f *Feed) {
			f.Stored(first)
			cpu := *first
			cpu.Tier = CPU
			f.Stored(&cpu)
			f.Removed(GPU, []uint64{12})
		}, Match{GPU: 1, CPU: 1}, Counts{Stored: 4, Removed: 1}},
		{"no hash of its own", func(f *Feed) {
			f.Stored(&Stored{Hashes: []uint64{12}, Tokens: tokens[:8], BlockTokens: 4})
		}, Match{}, Counts{Ignored: 1}},
		{"more hashes than blocks", func(f *Feed) {
			f.Stored(&Stored{Hashes: []uint64{11, 12, 13}, Tokens: tokens[:8], BlockTokens: 4})
		}, Match{}, Counts{Ignored: 3}},
		{"partial block at the end", func(f *Feed) {
			f.Stored(&Stored{Hashes: []uint64{11, 12, 13}, Tokens: tokens[:11], BlockTokens: 4})
		}, Match{GPU: 2}, Counts{Stored: 2, Ignored: 1}},
		{"only a partial block", func(f *Feed) {
			f.Stored(&Stored{Hashes: []uint64{11}, Tokens: tokens[:3], BlockTokens: 4})
		}, Match{}, Counts{Ignored: 1}},
		{"shorter blocks after whole ones", func(f *Feed) {
			f.Stored(first)
			f.Stored(&Stored{Hashes: []uint64{15}, Parent: 12, HasParent: true, Tokens: tokens[8:10], BlockTokens: 2})
		}, Match{GPU: 2}, Counts{Stored: 2, Ignored: 1}},
		{"shorter blocks before whole ones", func(f *Feed) {
			f.Stored(&Stored{Hashes: []uint64{15}, Tokens: tokens[:2], BlockTokens: 2})
			f.Stored(first)
		}, Match{GPU: 2}, Counts{Stored: 3}},
		{"no block length", func(f *Feed) { f.Stored(&Stored{Hashes: []uint64{11}, Tokens: tokens[:4]}) },
			Match{}, Counts{Ignored: 1}},
		{"another adapter", func(f *Feed) {
			e := *first
			e.Lora = "l"
			f.Stored(&e)
		}, Match{}, Counts{Stored: 2}},
		{"another salt, then none", func(f *Feed) {
			e := *first
			e.Hashes, e.Salt = []uint64{21, 22}, "s"
			f.Stored(&e)
			f.Stored(first)
		}, Match{GPU: 2}, Counts{Stored: 4}},
		{"offload without tokens", func(f *Feed) {
			f.Stored(first)
			f.Stored(&Stored{Hashes: []uint64{11, 99}, BlockTokens: 4, Tier: Disk})
			f.Removed(GPU, []uint64{11})
		}, Match{GPU: 1, Disk: 1}, Counts{Stored: 3, Removed: 1, Orphans: 1}},
		{"offload of longer blocks", func(f *Feed) {
			f.Stored(first)
			f.Stored(&Stored{Hashes: []uint64{11}, BlockTokens: 8, Tier: Disk})
		}, Match{GPU: 2}, Counts{Stored: 2, Ignored: 1}},
		{"removed, then stored again", func(f *Feed) {
			f.Stored(first)
			f.Removed(GPU, []uint64{11, 12})
			f.Stored(first)
		}, Match{GPU: 2}, Counts{Stored: 4, Removed: 2}},
		{"unknown removed", func(f *Feed) { f.Stored(first); f.Removed(GPU, []uint64{98, 99}); f.Removed(CPU, []uint64{11}) },
			Match{GPU: 2}, Counts{Stored: 2, Strays: 3}},
		{"moved", func(f *Feed) {
			f.Stored(first)
			f.Moved(GPU, CPU, []uint64{11, 12, 99})
			f.Moved(CPU, GPU, []uint64{12})
		},
			Match{CPU: 1, GPU: 1}, Counts{Stored: 5, Removed: 3, Strays: 1}},
		{"two engine hashes of one block", func(f *Feed) {
			f.Stored(first)
			f.Stored(&Stored{Hashes: []uint64{31, 32}, Tokens: tokens[:8], BlockTokens: 4})
			f.Stored(&Stored{Hashes: []uint64{41, 42}, Tokens: tokens[:8], BlockTokens: 4})
			f.Removed(GPU, []uint64{31, 12, 11, 42})
		}, Match{GPU: 2}, Counts{Stored: 2}},
		{"all engine hashes of one block gone", func(f *Feed) {
			f.Stored(first)
			f.Stored(&Stored{Hashes: []uint64{31, 32}, Tokens: tokens[:8], BlockTokens: 4})
			f.Removed(GPU, []uint64{12, 32, 31})
		}, Match{GPU: 1}, Counts{Stored: 2, Removed: 1}},
		{"engine hash of other tokens now", func(f *Feed) {
			f.Stored(first)
			f.Stored(&Stored{Hashes: []uint64{12}, Tokens: tokens[20:24], BlockTokens: 4})
		}, Match{GPU: 1}, Counts{Stored: 3, Removed: 1, Replaced: 1}},
		{"cleared", func(f *Feed) { f.Stored(first); f.Cleared(); f.Stored(next) }, Match{}, Counts{Stored: 2, Orphans: 2}},
		{"nothing", func(f *Feed) {
			f.Stored(&Stored{})
			f.Removed(GPU, nil)
			f.Stored(&Stored{Hashes: []uint64{1}, Tier: 9})
		},
			Match{}, Counts{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			x := New(Options{})
			target := x.Add()
			tt.feed(NewFeed(x, target, "m"))
			out := make([]Match, 1)
			x.Match(AppendTokens(nil, Seed("m", "", ""), tokens, 4), out)
			if out[0] != tt.want {
				t.Errorf("match %+v, want %+v", out[0], tt.want)
			}
			if got := x.Counts(target); got != tt.count {
				t.Errorf("counts %+v, want %+v", got, tt.count)
			}
		})
	}
}

// TestFeedOfDroppedTarget continues to feed after the target has left and another target
// has its slot.
func TestFeedOfDroppedTarget(t *testing.T) {
	x := New(Options{})
	f := NewFeed(x, x.Add(), "m")
	e := &Stored{Hashes: []uint64{1}, Tokens: []uint32{1, 2, 3, 4}, BlockTokens: 4}
	f.Stored(e)
	x.Drop(0)
	if n := x.Targets(); n != 0 {
		t.Errorf("%d slots remain after the only target has left", n)
	}
	x.Add()
	f.Stored(e)
	f.Moved(GPU, CPU, e.Hashes)
	f.Removed(GPU, e.Hashes)
	f.Cleared()
	NewFeed(x, 17, "m").Stored(e)
	if n := x.Held(0); n != 0 {
		t.Errorf("the new target holds %d blocks of the old one's feed", n)
	}
	if c := x.Stats().Counts; c.Stored != 1 {
		t.Errorf("got %d blocks counted, want the old target's", c.Stored)
	}
}

// TestFeedSurvivesAnything feeds random events: there is no panic, and the index does not
// exceed its bound.
func TestFeedSurvivesAnything(t *testing.T) {
	r := rand.New(rand.NewPCG(15, 16))
	const bound = 200
	x := New(Options{MaxEntries: bound})
	feeds := []*Feed{NewFeed(x, x.Add(), "m"), NewFeed(x, x.Add(), "m")}
	hashes := func() []uint64 {
		all := make([]uint64, r.IntN(40))
		for i := range all {
			all[i] = r.Uint64N(300)
		}
		return all
	}
	for range 20000 {
		f := feeds[r.IntN(2)]
		switch r.IntN(10) {
		case 0:
			if r.IntN(50) == 0 {
				f.Cleared()
			}
		case 1, 2:
			f.Removed(Tier(r.IntN(5)), hashes())
		case 3:
			f.Moved(Tier(r.IntN(5)), Tier(r.IntN(5)), hashes())
		default:
			tokens := make([]uint32, r.IntN(100))
			for i := range tokens {
				tokens[i] = r.Uint32N(3)
			}
			f.Stored(&Stored{
				Hashes: hashes(), Parent: r.Uint64N(300), HasParent: r.IntN(3) > 0, Tokens: tokens,
				BlockTokens: r.IntN(6) - 1, Lora: "ab"[:r.IntN(2)], Tier: Tier(r.IntN(4)),
			})
		}
		if n := x.entries.Load(); n > bound {
			t.Fatalf("%d pairs, at most %d are allowed", n, bound)
		}
		if n := x.twins.Load(); n > bound {
			t.Fatalf("%d further hashes, at most %d are allowed", n, bound)
		}
	}
	for _, f := range feeds {
		f.Cleared()
	}
	if n := x.twins.Load(); n != 0 {
		t.Errorf("%d further hashes of targets without blocks", n)
	}
}

// TestFeedBoundsTwins: an engine that reports the same block under ever new hashes gets no more
// memory than the bound of the index allows.
func TestFeedBoundsTwins(t *testing.T) {
	x := New(Options{MaxEntries: 100})
	f := NewFeed(x, x.Add(), "m")
	block := func(hash uint64) *Stored {
		return &Stored{Hashes: []uint64{hash}, Tokens: []uint32{1, 2, 3, 4}, BlockTokens: 4}
	}
	for n := range uint64(10_000) {
		f.Stored(block(n + 1))
	}
	if n := f.tg.engine.n; n != 101 { // of the pair, and 100 further ones
		t.Errorf("the feed keeps %d hashes of the engine for one pair", n)
	}
	for n := range uint64(101) {
		f.Removed(GPU, []uint64{n + 1})
	}
	if n, twins := f.tg.engine.n, x.twins.Load(); n != 0 || twins != 0 || x.Held(0) != 0 {
		t.Errorf("after the removal: %d hashes, %d of them further ones, %d blocks", n, twins, x.Held(0))
	}
}
