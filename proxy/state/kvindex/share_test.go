package kvindex

import (
	"sync"
	"testing"
)

// invented stores n blocks of one token each in one chain, from the first token on, by events of
// at most 100 blocks. It returns how many were applied and refused.
func invented(f *Feed, first uint32, n int) (applied, refused int) {
	for at := 0; at < n; at += 100 {
		e := Stored{BlockTokens: 1, HasParent: at > 0, Parent: uint64(first) + uint64(at) - 1}
		for i := at; i < min(at+100, n); i++ {
			e.Hashes = append(e.Hashes, uint64(first)+uint64(i))
			e.Tokens = append(e.Tokens, first+uint32(i))
		}
		a, r := f.Stored(&e)
		applied, refused = applied+a, refused+r
	}
	return applied, refused
}

// shares is an index with a feed for each rank of its engines.
type shares struct {
	x         *Index
	feeds     [][]*Feed // by engine and rank
	reclaimed []Target
}

func newShares(entries int, ranks ...int) *shares {
	s := &shares{}
	s.x = New(Options{MaxEntries: entries, Reclaimed: func(t Target, blocks int) { s.reclaimed = append(s.reclaimed, t) }})
	for _, n := range ranks {
		s.join(n)
	}
	return s
}

// join adds an engine.
func (s *shares) join(ranks int) []*Feed {
	var feeds []*Feed
	for _, t := range s.x.AddRanks(ranks) {
		feeds = append(feeds, NewFeed(s.x, t, "m"))
	}
	s.feeds = append(s.feeds, feeds)
	return feeds
}

func (s *shares) held(engine int) (n int) {
	for _, f := range s.feeds[engine] {
		n += s.x.Held(f.tg.slot)
	}
	return n
}

// TestShareOfOneEngine: an engine uses the whole index while there is room, alone and beside
// engines that hold little.
func TestShareOfOneEngine(t *testing.T) {
	s := newShares(1000, 1, 1, 1)
	invented(s.feeds[1][0], 1, 50)
	if applied, refused := invented(s.feeds[0][0], 5000, 900); applied != 900 || refused != 0 {
		t.Errorf("applied %d, refused %d", applied, refused)
	}
	if applied, refused := invented(s.feeds[0][0], 10000, 100); applied != 50 || refused != 50 {
		t.Errorf("of 100 blocks for 50 places: applied %d, refused %d", applied, refused)
	}
	if len(s.reclaimed) > 0 || s.held(1) != 50 {
		t.Errorf("the index took blocks of %v for an engine above its share", s.reclaimed)
	}
}

// TestFloodLeavesShares: an engine that reports more blocks than fit, alone or as several
// ranks, does not exclude the blocks of another engine, which joins before or after the flood.
func TestFloodLeavesShares(t *testing.T) {
	for name, tt := range map[string]struct {
		ranks int
		late  bool
	}{"one rank": {ranks: 1}, "eight ranks": {ranks: 8}, "the other engine joins late": {ranks: 1, late: true}, "eight ranks, late": {ranks: 8, late: true}} {
		t.Run(name, func(t *testing.T) {
			s := newShares(8000, tt.ranks)
			if !tt.late {
				s.join(1)
			}
			next := uint32(1)
			flood := func(blocks int) {
				for _, f := range s.feeds[0] {
					invented(f, next, blocks)
					next += uint32(blocks)
				}
			}
			flood(9000)
			if tt.late {
				s.join(1)
			}
			honest := s.feeds[1][0]
			stored := 0
			for i := range 39 { // to nearly its share, while the flood goes on
				applied, refused := invented(honest, uint32(3e9)+uint32(i)*1000, 100)
				if refused > 0 {
					t.Fatalf("after %d blocks, %d were refused", stored, refused)
				}
				stored += applied
				flood(300)
			}
			if got := s.held(1); got != stored || stored != 3900 {
				t.Errorf("the engine holds %d of its %d blocks", got, stored)
			}
			if n := s.held(0); n > 4100 {
				t.Errorf("the flood holds %d of 8000 after it has exceeded its share", n)
			}
			seen := map[Target]bool{}
			for _, victim := range s.reclaimed {
				if seen[victim] || victim == honest.tg.slot {
					t.Errorf("lost their blocks: %v", s.reclaimed)
				}
				seen[victim] = true
			}
		})
	}
}

// TestJoiningClearsNoEqual: in a full index with equal engines, a new engine is refused, and no
// engine loses its blocks.
func TestJoiningClearsNoEqual(t *testing.T) {
	s := newShares(1000, 1, 1, 1, 1)
	for i, feeds := range s.feeds {
		invented(feeds[0], uint32(1+i*1000), 250)
	}
	joined := s.join(1)[0]
	if applied, refused := invented(joined, 1e6, 10); applied != 0 || refused != 10 || len(s.reclaimed) > 0 {
		t.Errorf("applied %d, refused %d, lost their blocks: %v", applied, refused, s.reclaimed)
	}
	s.x.Drop(s.feeds[0][0].tg.slot)
	if applied, refused := invented(joined, 1e6, 10); applied != 10 || refused != 0 {
		t.Errorf("after an engine has left: applied %d, refused %d", applied, refused)
	}
}

// TestGuessesTakeNoShare: expected blocks do not make another engine lose its blocks.
func TestGuessesTakeNoShare(t *testing.T) {
	s := newShares(1000, 1, 1)
	invented(s.feeds[0][0], 1, 1000)
	s.x.Expect(s.feeds[1][0].tg.slot, AppendTokens(nil, Seed("m", "", ""), []uint32{7, 8, 9}, 1), at(0))
	if len(s.reclaimed) > 0 || s.held(0) != 1000 {
		t.Errorf("lost their blocks: %v", s.reclaimed)
	}
}

// TestFurtherHashesHaveShares: an engine that reports the same block under ever new hashes
// leaves room for those of another engine.
func TestFurtherHashesHaveShares(t *testing.T) {
	s := newShares(100, 1, 1)
	again := func(f *Feed, hash uint64) int {
		applied, _ := f.Stored(&Stored{Hashes: []uint64{hash}, Tokens: []uint32{1, 2, 3, 4}, BlockTokens: 4})
		return applied
	}
	for n := range uint64(1000) {
		again(s.feeds[0][0], n+1)
	}
	for n := range uint64(50) {
		if again(s.feeds[1][0], n+1) != 1 {
			t.Fatalf("further hash %d was refused", n)
		}
	}
}

// TestSharesUnderRace: floods of several engines at once neither block each other nor exceed
// the bound.
func TestSharesUnderRace(t *testing.T) {
	const entries = 2000
	x := New(Options{MaxEntries: entries, Reclaimed: func(Target, int) {}})
	var wg sync.WaitGroup
	for engine := range 4 {
		f := NewFeed(x, x.Add(), "m")
		wg.Go(func() {
			for i := range 30 {
				invented(f, uint32(engine)<<24|uint32(i)<<12, 1000)
				if i%10 == 9 {
					f.Cleared()
				}
			}
		})
	}
	wg.Wait()
	s := x.Stats()
	if s.Entries < 0 || s.Entries > entries+4*chunk {
		t.Errorf("%d pairs", s.Entries)
	}
	for slot := range Target(4) {
		x.Clear(slot)
	}
	x.sweep()
	if n, dead := x.entries.Load(), x.dead.Load(); n != 0 || dead != 0 {
		t.Errorf("%d pairs and %d of dropped targets remain", n, dead)
	}
}
