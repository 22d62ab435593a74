package conversation

import (
	"github.com/zeebo/xxh3"

	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// End is a position in a prompt at which an earlier prompt may have ended.
type End struct {
	Blocks int32        // the whole blocks of the prompt before the position
	Hash   kvindex.Hash // of the prompt up to the position
}

// endSeed keeps the hashes of ends and of blocks apart.
const endSeed = 0x656E64206F662061

// AppendEnds appends the ends of a prompt at the given positions of its text. The
// positions must ascend and be above 0. chain has the hashes of the text's whole blocks.
// block is the length of a block in bytes. seed is the hash before the first block.
//
// Two prompts with the same text up to a position have the same End there, if both calls
// pass the same positions between the last whole block and that position. So pass either
// all or none of a block's positions.
func AppendEnds(dst []End, seed kvindex.Hash, chain []kvindex.Hash, block int, text []byte, positions []int32) []End {
	blocks, from, hash := -1, 0, uint64(0)
	for _, position := range positions {
		to := int(position)
		if n := to / block; n != blocks {
			blocks, from, hash = n, n*block, uint64(seed)
			if n > 0 {
				hash = uint64(chain[n-1])
			}
			hash ^= endSeed
		}
		hash = xxh3.HashSeed(text[from:to], hash)
		from = to
		dst = append(dst, End{Blocks: int32(blocks), Hash: kvindex.Hash(hash)})
	}
	return dst
}
