package enginesim

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

func numbers(from, n int) []core.Token {
	tokens := make([]core.Token, n)
	for i := range tokens {
		tokens[i] = core.Token(from + i)
	}
	return tokens
}

// testRank wraps a cache for checkAccounting.
func testRank(c *core.KVCache) *core.Rank { return &core.Rank{Cache: c} }

func TestKVCachePrefix(t *testing.T) {
	c := core.NewKVCache(8, 4, 1)
	tokens := numbers(0, 10)
	ids := c.Take(nil, 3)
	c.Publish(ids, tokens, 0, c.Root(""))
	tests := []struct {
		name   string
		salt   string
		tokens []core.Token
		hit    int
	}{
		{"the same prompt", "", tokens, 2},
		{"a longer one", "", numbers(0, 30), 2},
		{"the last token is always computed", "", numbers(0, 8), 1},
		{"another salt", "x", tokens, 0},
		{"another start", "", numbers(1, 10), 0},
		{"less than a block", "", numbers(0, 4), 0},
		{"shares one block", "", append(numbers(0, 4), numbers(90, 9)...), 1},
		{"second block alone", "", numbers(4, 9), 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if hit := c.Match(tt.salt, tt.tokens); !slices.Equal(hit, ids[:tt.hit]) {
				t.Errorf("hit %v, want %v", hit, ids[:tt.hit])
			}
		})
	}
	c.Drop(ids)
	if hit := c.Match("", tokens); len(hit) != 2 {
		t.Errorf("blocks after drop: %v", hit)
	}
	checkAccounting(t, testRank(c))
}

// TestKVCacheEviction: idle cached blocks are reused last, oldest first, and
// the tail of a chain before its head.
func TestKVCacheEviction(t *testing.T) {
	c := core.NewKVCache(4, 2, 1)
	old, young := c.Take(nil, 2), c.Take(nil, 1)
	c.Publish(old, numbers(0, 4), 0, core.Link{})
	c.Publish(young, numbers(10, 2), 0, core.Link{})
	c.Drop(old)
	c.Drop(young)
	if got := c.Take(nil, 1); slices.Contains(old, got[0]) || slices.Contains(young, got[0]) {
		t.Errorf("take returned %v although a block without content is free", got)
	}
	if got := c.Take(nil, 1); got[0] != old[1] {
		t.Errorf("take returned %v, want the end of the oldest chain %d", got, old[1])
	}
	if hit := c.Match("", numbers(0, 5)); len(hit) != 1 {
		t.Errorf("hit %v", hit)
	}
	if got := c.Take(nil, 1); got[0] != old[0] {
		t.Errorf("take returned %v, want %d", got, old[0])
	}
	if hit := c.Match("", numbers(10, 3)); len(hit) != 1 || c.Fits(nil, 2) || !c.Fits(hit, 1) || c.Fits(hit, 2) {
		t.Errorf("hit %v, free %d", hit, c.Free)
	}
	checkAccounting(t, testRank(c))
}

// TestKVCacheContent: freed or reused blocks cannot be read again.
func TestKVCacheContent(t *testing.T) {
	c := core.NewKVCache(4, 2, 1)
	ids := c.Take(nil, 2)
	for i := range 4 {
		*c.At(ids, i) = core.Kv(i + 1)
	}
	right := c.Read(ids, true)
	if want := []byte{1, 0, 0, 0, 0, 0, 0, 0, 2}; !bytes.HasPrefix(right, want) || len(right) != 4*core.BytesPerKV {
		t.Fatalf("content % x", right)
	}
	if bytes.Equal(c.Read(ids, false), right) {
		t.Error("read without a lease")
	}
	c.Drop(ids)
	if bytes.Equal(c.Read(ids, true), right) {
		t.Error("read after free")
	}
	for _, id := range c.Take(nil, 4) {
		for _, v := range c.Blocks[id].Data {
			if v >= 1 && v <= 4 {
				t.Error("content survived free")
			}
		}
	}
	c.Write([]core.BlockID{3, 2}, right)
	if !bytes.Equal(c.Read([]core.BlockID{3, 2}, true), right) {
		t.Error("the written bytes differ from the read bytes")
	}
	c.Write([]core.BlockID{3, 2}, right[:9]) // short payloads stop at the last whole entry
}

func TestKVCacheDropTwice(t *testing.T) {
	c := core.NewKVCache(2, 2, 1)
	ids := c.Take(nil, 1)
	c.Drop(ids)
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	c.Drop(ids)
}

// TestKVCacheHammer takes, publishes and drops at random and checks the
// accounting after every step.
func TestKVCacheHammer(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	c := core.NewKVCache(40, 4, 1)
	var held [][]core.BlockID
	for range 3000 {
		if len(held) > 0 && rng.IntN(5) < 2 {
			i := rng.IntN(len(held))
			c.Drop(held[i])
			held = slices.Delete(held, i, i+1)
		} else {
			tokens := numbers(100*rng.IntN(4), 1+rng.IntN(40))
			want := c.BlocksFor(len(tokens))
			hit := c.Match("", tokens)
			if !c.Fits(hit, want) {
				continue
			}
			ids := c.Take(hit, want)
			if len(slices.Compact(slices.Sorted(slices.Values(ids)))) != want {
				t.Fatalf("blocks %v repeat", ids)
			}
			c.Publish(ids, tokens, 0, core.Link{})
			held = append(held, ids)
		}
		checkAccounting(t, testRank(c))
	}
	for _, ids := range held {
		c.Drop(ids)
	}
	if used, _ := c.Usage(); used != 0 {
		t.Errorf("%d blocks lost", used)
	}
}
