package enginesim

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"
)

func numbers(from, n int) []token {
	tokens := make([]token, n)
	for i := range tokens {
		tokens[i] = token(from + i)
	}
	return tokens
}

// testRank wraps a cache for checkAccounting.
func testRank(c *kvCache) *rank { return &rank{cache: c} }

func TestKVCachePrefix(t *testing.T) {
	c := newKVCache(8, 4, 1)
	tokens := numbers(0, 10)
	ids := c.take(nil, 3)
	c.publish(ids, tokens, 0, c.root(""))
	tests := []struct {
		name   string
		salt   string
		tokens []token
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
			if hit := c.match(tt.salt, tt.tokens); !slices.Equal(hit, ids[:tt.hit]) {
				t.Errorf("hit %v, want %v", hit, ids[:tt.hit])
			}
		})
	}
	c.drop(ids)
	if hit := c.match("", tokens); len(hit) != 2 {
		t.Errorf("blocks after drop: %v", hit)
	}
	checkAccounting(t, testRank(c))
}

// TestKVCacheEviction: idle cached blocks are reused last, oldest first, and
// the tail of a chain before its head.
func TestKVCacheEviction(t *testing.T) {
	c := newKVCache(4, 2, 1)
	old, young := c.take(nil, 2), c.take(nil, 1)
	c.publish(old, numbers(0, 4), 0, link{})
	c.publish(young, numbers(10, 2), 0, link{})
	c.drop(old)
	c.drop(young)
	if got := c.take(nil, 1); slices.Contains(old, got[0]) || slices.Contains(young, got[0]) {
		t.Errorf("take returned %v although a block without content is free", got)
	}
	if got := c.take(nil, 1); got[0] != old[1] {
		t.Errorf("take returned %v, want the end of the oldest chain %d", got, old[1])
	}
	if hit := c.match("", numbers(0, 5)); len(hit) != 1 {
		t.Errorf("hit %v", hit)
	}
	if got := c.take(nil, 1); got[0] != old[0] {
		t.Errorf("take returned %v, want %d", got, old[0])
	}
	if hit := c.match("", numbers(10, 3)); len(hit) != 1 || c.fits(nil, 2) || !c.fits(hit, 1) || c.fits(hit, 2) {
		t.Errorf("hit %v, free %d", hit, c.free)
	}
	checkAccounting(t, testRank(c))
}

// TestKVCacheContent: freed or reused blocks cannot be read again.
func TestKVCacheContent(t *testing.T) {
	c := newKVCache(4, 2, 1)
	ids := c.take(nil, 2)
	for i := range 4 {
		*c.at(ids, i) = kv(i + 1)
	}
	right := c.read(ids, true)
	if want := []byte{1, 0, 0, 0, 0, 0, 0, 0, 2}; !bytes.HasPrefix(right, want) || len(right) != 4*bytesPerKV {
		t.Fatalf("content % x", right)
	}
	if bytes.Equal(c.read(ids, false), right) {
		t.Error("read without a lease")
	}
	c.drop(ids)
	if bytes.Equal(c.read(ids, true), right) {
		t.Error("read after free")
	}
	for _, id := range c.take(nil, 4) {
		for _, v := range c.blocks[id].data {
			if v >= 1 && v <= 4 {
				t.Error("content survived free")
			}
		}
	}
	c.write([]blockID{3, 2}, right)
	if !bytes.Equal(c.read([]blockID{3, 2}, true), right) {
		t.Error("the written bytes differ from the read bytes")
	}
	c.write([]blockID{3, 2}, right[:9]) // short payloads stop at the last whole entry
}

func TestKVCacheDropTwice(t *testing.T) {
	c := newKVCache(2, 2, 1)
	ids := c.take(nil, 1)
	c.drop(ids)
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	c.drop(ids)
}

// TestKVCacheHammer takes, publishes and drops at random and checks the
// accounting after every step.
func TestKVCacheHammer(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	c := newKVCache(40, 4, 1)
	var held [][]blockID
	for range 3000 {
		if len(held) > 0 && rng.IntN(5) < 2 {
			i := rng.IntN(len(held))
			c.drop(held[i])
			held = slices.Delete(held, i, i+1)
		} else {
			tokens := numbers(100*rng.IntN(4), 1+rng.IntN(40))
			want := c.blocksFor(len(tokens))
			hit := c.match("", tokens)
			if !c.fits(hit, want) {
				continue
			}
			ids := c.take(hit, want)
			if len(slices.Compact(slices.Sorted(slices.Values(ids)))) != want {
				t.Fatalf("blocks %v repeat", ids)
			}
			c.publish(ids, tokens, 0, link{})
			held = append(held, ids)
		}
		checkAccounting(t, testRank(c))
	}
	for _, ids := range held {
		c.drop(ids)
	}
	if used, _ := c.usage(); used != 0 {
		t.Errorf("%d blocks lost", used)
	}
}
