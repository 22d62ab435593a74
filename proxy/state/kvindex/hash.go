package kvindex

import (
	"unsafe"

	"github.com/zeebo/xxh3"
)

// Hash identifies a block and all blocks before it: the hash of the block's tokens (or
// text), seeded with the hash of the block before it. Its low three bits are zero. It
// is a routing hint: 61 bits do not protect against an adversary.
type Hash uint64

// hashMask clears the low bits, which a Hash does not use: feeds keep tiers there.
const hashMask = ^uint64(7)

// textSeed makes the hash chains of text differ from those of tokens.
const textSeed = 0x7465787420636861

// Seed returns the hash before the first block of a prompt for a model, a LoRA adapter
// ("" for none) and a cache salt ("" for none). Prompts that differ in one of them
// share no blocks.
func Seed(model, lora, salt string) Hash {
	h := xxh3.HashStringSeed(model, 1)
	h = xxh3.HashStringSeed(lora, h)
	return Hash(xxh3.HashStringSeed(salt, h) & hashMask)
}

// AppendTokens appends the hashes of a prompt's full blocks of block tokens each. A
// partial last block has no hash. If block is not positive it returns dst unchanged.
func AppendTokens(dst []Hash, seed Hash, tokens []uint32, block int) []Hash {
	if block <= 0 {
		return dst
	}
	for ; len(tokens) >= block; tokens = tokens[block:] {
		seed = hashTokens(seed, tokens[:block])
		dst = append(dst, seed)
	}
	return dst
}

// hashTokens returns the hash of one non-empty block after the block with the hash
// seed: xxh3 over the tokens in memory, four bytes each.
func hashTokens(seed Hash, tokens []uint32) Hash {
	bytes := unsafe.Slice((*byte)(unsafe.Pointer(&tokens[0])), 4*len(tokens))
	return Hash(xxh3.HashSeed(bytes, uint64(seed)) & hashMask)
}

// AppendText is AppendTokens for a prompt as text, in blocks of block bytes. It is used
// for engines whose tokens are not known.
func AppendText(dst []Hash, seed Hash, text []byte, block int) []Hash {
	if block <= 0 {
		return dst
	}
	for ; len(text) >= block; text = text[block:] {
		seed = Hash(xxh3.HashSeed(text[:block], uint64(seed)^textSeed) & hashMask)
		dst = append(dst, seed)
	}
	return dst
}
