package enginesim

import (
	"encoding/hex"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/trtllm"
)

// goldenEvents are events for every wire: two blocks, one at a salt's root and
// one after it; both removed; all cleared.
func goldenEvents() []core.KVEvent {
	var one, two core.BlockName
	for i := range one {
		one[i], two[i] = byte(i), byte(255-i)
	}
	return []core.KVEvent{
		{Kind: core.KVStored, Names: []core.BlockName{one, two}, Root: true, Tokens: []core.Token{1, 200, 70000, 33554431}, Size: 2, Salt: "s"},
		{Kind: core.KVStored, Names: []core.BlockName{two}, Parent: one, Tokens: []core.Token{5, 6}, Size: 2},
		{Kind: core.KVRemoved, Names: []core.BlockName{one, two}},
		{Kind: core.KVCleared},
	}
}

// TestKVEventWires: the bytes of msgspec for the structs of vLLM and SGLang,
// written by hand from the two formats.
func TestKVEventWires(t *testing.T) {
	tests := []struct {
		name, want string
		wire       core.KVWire
	}{
		{"vllm maps", "93cb3ff8000000000000958aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf18191a1b1c1d1e1fcfe7e6e5e4e3e2e1e0b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401ccc8ce00011170ce01ffffffaa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739291a173c0a967726f75705f696478008aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfe7e6e5e4e3e2e1e0b1706172656e745f626c6f636b5f68617368cf18191a1b1c1d1e1fa9746f6b656e5f696473920506aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f6964780084a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf18191a1b1c1d1e1fa66d656469756da3475055a967726f75705f6964780084a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cfe7e6e5e4e3e2e1e0a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656403", core.VLLMWire{}.Batch},
		{"vllm arrays", "93cb3ff8000000000000959aab426c6f636b53746f72656492cf18191a1b1c1d1e1fcfe7e6e5e4e3e2e1e0c09401ccc8ce00011170ce01ffffff02c0a3475055c09291a173c0009aab426c6f636b53746f72656491cfe7e6e5e4e3e2e1e0cf18191a1b1c1d1e1f92050602c0a3475055c091c00094ac426c6f636b52656d6f76656491cf18191a1b1c1d1e1fa34750550094ac426c6f636b52656d6f76656491cfe7e6e5e4e3e2e1e0a34750550091b0416c6c426c6f636b73436c656172656403", core.VLLMWire{Arrays: true}.Batch},
		{"vllm digests", "93cb3ff8000000000000958aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc420fffefdfcfbfaf9f8f7f6f5f4f3f2f1f0efeeedecebeae9e8e7e6e5e4e3e2e1e0b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401ccc8ce00011170ce01ffffffaa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739291a173c0a967726f75705f696478008aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c420fffefdfcfbfaf9f8f7f6f5f4f3f2f1f0efeeedecebeae9e8e7e6e5e4e3e2e1e0b1706172656e745f626c6f636b5f68617368c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa9746f6b656e5f696473920506aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f6964780084a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa66d656469756da3475055a967726f75705f6964780084a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c420fffefdfcfbfaf9f8f7f6f5f4f3f2f1f0efeeedecebeae9e8e7e6e5e4e3e2e1e0a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656403", core.VLLMWire{Digests: true}.Batch},
		{"sglang", "93cb3ff80000000000009498ab426c6f636b53746f72656492cf0001020304050607d3fffefdfcfbfaf9f8c09401ccc8ce00011170ce01ffffff02c0a347505581aa63616368655f73616c74a17397ab426c6f636b53746f72656491d3fffefdfcfbfaf9f8cf000102030405060792050602c0a347505593ac426c6f636b52656d6f76656492cf0001020304050607d3fffefdfcfbfaf9f8a347505591b0416c6c426c6f636b73436c656172656403", core.SGLangWire},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			want, _ := hex.DecodeString(tt.want)
			if got := tt.wire(time.Unix(1, 5e8), 3, goldenEvents()); !slices.Equal(got, want) {
				t.Errorf("got  %x\nwant %x", got, want)
			}
			if _, rest, err := msgp.ReadIntfBytes(want); err != nil || len(rest) > 0 {
				t.Errorf("golden: %d bytes after the message, %v", len(rest), err)
			}
		})
	}
}

// TestKVEventNames compares with hashes that other programs computed from the
// engines' documents.
func TestKVEventNames(t *testing.T) {
	chain := func(n core.Naming, salt string, from, count, size int) []core.BlockName {
		c := core.NewKVCache(8, size, 1)
		c.Log = &core.KVLog{Naming: n}
		c.PublishTail(c.Take(nil, c.BlocksFor(count)), numbers(from, count), 0, c.Root(salt))
		var names []core.BlockName
		for _, e := range c.Log.Events {
			names = append(names, e.Names...)
		}
		return names
	}
	var sglang []int64
	for _, salt := range []string{"", "tenant-a"} {
		for _, name := range chain(core.SGLangNaming{}, salt, 1, 8, 4) {
			sglang = append(sglang, core.SGLangHash(name))
		}
	}
	if want := []int64{-3488128144981237669, 5674439469042975057, 3718046898735569995}; !slices.Equal(sglang[:3], want) {
		t.Errorf("sglang: %d, want %d", sglang, want)
	}
	for salt, want := range map[string][]uint64{
		"":         {361446065899365, 3720631715349728507, 6093395636538707606},
		"tenant-a": {8965006706970510538, 11856313564396197808, 411245560415275545},
	} {
		var got []uint64
		for _, name := range chain(trtllm.TRTNaming{}, salt, 101, 9, 4) {
			got = append(got, trtllm.TRTHash(name))
		}
		if !slices.Equal(got, want) {
			t.Errorf("trtllm %q: %d, want %d", salt, got, want)
		}
	}
	// vLLM's hashes depend on the process.
	one, other := chain(core.VLLMNaming{Seed: "a"}, "", 1, 8, 4), chain(core.VLLMNaming{Seed: "b"}, "", 1, 8, 4)
	if one[0] == other[0] || one[0] == one[1] || !slices.Equal(one, chain(core.VLLMNaming{Seed: "a"}, "", 1, 8, 4)) {
		t.Errorf("vllm: %x and %x", one, other)
	}
}

// mirror is a reader's copy of a prefix cache.
type mirror map[core.BlockName]bool

func (m mirror) apply(t *testing.T, events []core.KVEvent) {
	t.Helper()
	for _, e := range events {
		switch e.Kind {
		case core.KVStored:
			if len(e.Tokens) != len(e.Names)*e.Size || !e.Root && !m[e.Parent] {
				t.Fatalf("stored %+v", e)
			}
			for _, name := range e.Names {
				m[name] = true
			}
		case core.KVRemoved:
			for _, name := range e.Names {
				if !m[name] {
					t.Fatalf("removed %x, which was not there", name)
				}
				delete(m, name)
			}
		case core.KVCleared:
			clear(m)
		}
	}
}

// cached returns the names of the blocks in a cache.
func cached(c *core.KVCache) mirror {
	m := mirror{}
	for _, id := range c.ByHash {
		m[c.Blocks[id].Name] = true
	}
	return m
}

// TestKVEventsMirrorTheCache: after any operations on a cache, its events give
// exactly the blocks in it.
func TestKVEventsMirrorTheCache(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 7))
		c := core.NewKVCache(24, 4, seed)
		c.Log = &core.KVLog{Naming: []core.Naming{core.VLLMNaming{Seed: "x"}, core.SGLangNaming{}, trtllm.TRTNaming{}}[seed%3], Hits: seed%3 == 0}
		m := mirror{}
		type holder struct {
			ids       []core.BlockID
			tokens    []core.Token
			published int
			parent    core.Link
		}
		var held []holder
		for range 400 {
			switch rng.IntN(5) {
			case 0, 1:
				salt := []string{"", "s"}[rng.IntN(2)]
				h := holder{tokens: append(numbers(rng.IntN(3), 4), numbers(rng.IntN(3), 1+rng.IntN(16))...)}
				hit, want := c.Match(salt, h.tokens), c.BlocksFor(len(h.tokens))
				if !c.Fits(hit, want) {
					continue
				}
				h.ids = c.Take(hit, want)
				h.published, h.parent = c.Publish(h.ids, h.tokens[:len(hit)*4], 0, c.Root(salt))
				held = append(held, h)
			case 2:
				if len(held) == 0 {
					continue
				}
				h := &held[rng.IntN(len(held))]
				h.published, h.parent = c.Publish(h.ids, h.tokens, h.published, h.parent)
			case 3:
				if len(held) == 0 {
					continue
				}
				i := rng.IntN(len(held))
				if h := held[i]; seed%3 == 2 {
					c.PublishTail(h.ids, h.tokens, h.published, h.parent)
				}
				c.Drop(held[i].ids)
				held = slices.Delete(held, i, i+1)
			case 4:
				if used := c.Free < len(c.Blocks); rng.IntN(20) == 0 && c.Clear() == used {
					t.Fatalf("cleared %v while used %v", !used, used)
				}
			}
			m.apply(t, c.Log.Events)
			c.Log.Events = nil
			if want := cached(c); !maps.Equal(m, want) {
				t.Fatalf("seed %d: %d blocks from events, %d in the cache", seed, len(m), len(want))
			}
		}
		checkAccounting(t, testRank(c))
	}
}

// TestKVEventHits: vLLM's caches log prefix hits again, the others do not, and
// blocks of one chain share an event.
func TestKVEventHits(t *testing.T) {
	for _, hits := range []bool{true, false} {
		c := core.NewKVCache(8, 4, 1)
		c.Log = &core.KVLog{Naming: core.VLLMNaming{Seed: "x"}, Hits: hits}
		tokens := numbers(0, 13)
		ids := c.Take(nil, 4)
		c.Publish(ids, tokens, 0, c.Root(""))
		if e := c.Log.Events; len(e) != 1 || len(e[0].Names) != 3 || !e[0].Root || !slices.Equal(e[0].Tokens, tokens[:12]) {
			t.Fatalf("stored: %+v", e)
		}
		c.Drop(ids)
		c.Log.Events = nil
		ids = c.Take(c.Match("", tokens), 4)
		c.Publish(ids, tokens[:12], 0, c.Root(""))
		want := 0
		if hits {
			want = 1
		}
		if e := c.Log.Events; len(e) != want || hits && (len(e[0].Names) != 3 || !e[0].Root) {
			t.Errorf("hit, logged %v: %+v", hits, e)
		}
		c.Drop(ids)
	}
}
