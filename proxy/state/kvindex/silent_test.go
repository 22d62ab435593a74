package kvindex

import (
	"math/rand/v2"
	"testing"
	"time"
)

// TestSilence: blocks that were expected after the last event of a target stay for Limits.Silent,
// because a target without events confirms none. An event ends that. TTL is 30 s, Silent 100 s.
func TestSilence(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	tokens := make([]uint32, 40)
	for i := range tokens {
		tokens[i] = r.Uint32()
	}
	chain := AppendTokens(nil, Seed("m", "", ""), tokens, 4)
	other := AppendTokens(nil, Seed("m", "", ""), []uint32{1, 2, 3, 4}, 4)
	event := func(x *Index) {
		NewFeed(x, 0, "m").Stored(&Stored{Hashes: []uint64{77}, Tokens: []uint32{1, 2, 3, 4}, BlockTokens: 4})
	}
	for _, tt := range []struct {
		name         string
		tale         func(x *Index)
		held, silent int
		other        int
	}{
		{"no event ever", func(x *Index) { x.Expect(0, chain, at(0)); x.Tend(at(99)) }, 10, 10, 0},
		{"not for ever", func(x *Index) { x.Expect(0, chain, at(0)); x.Tend(at(100)) }, 0, 0, 0},
		{"not silent before its time", func(x *Index) { x.Expect(0, chain, at(0)); x.Tend(at(29)) }, 10, 0, 0},
		{"events confirm other blocks only", func(x *Index) { x.Expect(0, chain, at(0)); event(x); x.Tend(at(30)) }, 0, 0, 1},
		{"the last event was before", func(x *Index) {
			x.Tend(at(0))
			event(x)
			x.Expect(0, chain, at(1))
			x.Tend(at(60))
		}, 10, 10, 1},
		{"events come back", func(x *Index) {
			x.Expect(0, chain, at(0))
			x.Tend(at(60))
			event(x)
			x.Tend(at(60))
		}, 0, 0, 1},
		{"an event confirms them", func(x *Index) {
			x.Expect(0, chain, at(0))
			x.Tend(at(60))
			hashes := make([]uint64, 10)
			for i := range hashes {
				hashes[i] = uint64(100 + i)
			}
			NewFeed(x, 0, "m").Stored(&Stored{Hashes: hashes, Tokens: tokens, BlockTokens: 4})
			x.Tend(at(300))
		}, 10, 0, 0},
		{"a failed leg", func(x *Index) { x.Expect(0, chain, at(0)); x.Unexpect(0, chain); x.Tend(at(60)) }, 0, 0, 0},
		{"expected again", func(x *Index) { x.Expect(0, chain, at(0)); x.Expect(0, chain, at(90)); x.Tend(at(150)) }, 10, 10, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			x := New(Options{GuessTTL: 30 * time.Second})
			x.Add()
			x.Limit(0, Limits{Silent: 100 * time.Second})
			tt.tale(x)
			now := time.UnixMilli(x.at(0).guesses.now)
			if n, silent, o := held(x, chain), x.Silent(0, now), held(x, other); n != tt.held || silent != tt.silent || o != tt.other {
				t.Errorf("%d blocks, %d of them silent, %d of events; want %d, %d and %d", n, silent, o, tt.held, tt.silent, tt.other)
			}
		})
	}
}
