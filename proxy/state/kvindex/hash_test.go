package kvindex

import (
	"bytes"
	"encoding/binary"
	"slices"
	"strconv"
	"testing"

	"github.com/zeebo/xxh3"
)

// TestChain computes the hashes of a prompt independently.
func TestChain(t *testing.T) {
	tokens := make([]uint32, 70)
	var wire []byte
	for i := range tokens {
		tokens[i] = uint32(i * 1000003)
		wire = binary.LittleEndian.AppendUint32(wire, tokens[i])
	}
	seed := Seed("m", "lora", "salt")
	var want []Hash
	for h, at := uint64(seed), 0; at+64 <= len(wire); at += 64 {
		h = xxh3.HashSeed(wire[at:at+64], h) &^ 7
		want = append(want, Hash(h))
	}
	if got := AppendTokens(nil, seed, tokens, 16); !slices.Equal(got, want) || len(got) != 4 {
		t.Errorf("tokens: %x, want %x", got, want)
	}
	// Recordings contain hashes, so the hash function must not change.
	if seed != 0xe9b66ad2e151b5e0 || want[0] != 0x5e5f98877fdb79e8 {
		t.Errorf("seed %#x, first block %#x: the hash function has changed", seed, want[0])
	}
	// A chain can be continued from any block.
	if got := AppendTokens(want[:2:2], want[1], tokens[32:], 16); !slices.Equal(got, want) {
		t.Errorf("tokens in two parts: %x, want %x", got, want)
	}
	text := AppendText(nil, seed, wire, 64)
	if len(text) != 4 || text[0] == want[0] {
		t.Errorf("text: %x, want four hashes other than those of tokens", text)
	}
	if got := AppendText(text[:1:1], text[0], wire[64:], 64); !slices.Equal(got, text) {
		t.Errorf("text in two parts: %x, want %x", got, text)
	}
	for _, h := range slices.Concat(want, text) {
		if h&7 != 0 {
			t.Errorf("%x: the low three bits are not free", h)
		}
	}
	for _, block := range []int{0, -1, 71} {
		if got := AppendTokens(want, seed, tokens, block); !slices.Equal(got, want) {
			t.Errorf("blocks of %d: %x", block, got)
		}
		if got := AppendText(text, seed, []byte("short"), block); !slices.Equal(got, text) {
			t.Errorf("text blocks of %d: %x", block, got)
		}
	}
}

// TestHashTellsApart changes one input at a time and checks that the hash changes.
func TestHashTellsApart(t *testing.T) {
	seen := map[Hash]string{}
	note := func(what string, h Hash) {
		if other, ok := seen[h]; ok {
			t.Errorf("%s has the hash of %s", what, other)
		}
		seen[h] = what
	}
	for _, s := range [][3]string{{"m", "", ""}, {"m", "x", ""}, {"m", "", "x"}, {"x", "", ""}, {"", "m", ""}, {"mx", "", ""}, {"", "", ""}} {
		note("seed "+s[0]+","+s[1]+","+s[2], Seed(s[0], s[1], s[2]))
	}
	for _, n := range []int{1, 16, 127, 128, 129, 512, 1000} {
		tokens := make([]uint32, n)
		for i := range tokens {
			tokens[i] = uint32(i)
		}
		note("block", AppendTokens(nil, 8, tokens, n)[0])
		for _, i := range slices.Compact([]int{0, n / 2, n - 1}) {
			tokens[i] += 1 << 31
			note("block with another token", AppendTokens(nil, 8, tokens, n)[0])
			tokens[i] -= 1 << 31
		}
	}
}

func TestAppendAllocatesNothing(t *testing.T) {
	tokens, text := make([]uint32, 4096), bytes.Repeat([]byte("text"), 1024)
	dst := make([]Hash, 0, 512)
	for _, block := range []int{16, 64, 512} {
		if n := testing.AllocsPerRun(10, func() {
			dst = AppendTokens(dst[:0], 1, tokens, block)
			dst = AppendText(dst[:0], 1, text, block)
		}); n != 0 {
			t.Errorf("blocks of %d: %v allocations", block, n)
		}
	}
}

func BenchmarkAppendTokens(b *testing.B) {
	tokens := make([]uint32, 2048*16)
	dst := make([]Hash, 0, 2048)
	for _, block := range []int{16, 64, 256} {
		b.Run(strconv.Itoa(block), func(b *testing.B) {
			b.SetBytes(int64(4 * len(tokens)))
			for b.Loop() {
				dst = AppendTokens(dst[:0], 1, tokens, block)
			}
		})
	}
}
