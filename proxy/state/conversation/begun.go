package conversation

import (
	"sync/atomic"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// Begun remembers how the latest conversations of a model began. So a policy knows whether many
// conversations share a beginning, such as a system prompt. The zero value is ready to use. Safe for
// concurrent use.
type Begun struct {
	next atomic.Uint32
	ring [abi.SharedOf]atomic.Uint64 // the last known block of each beginning; 0: none
}

// Add adds a conversation whose prompt begins with the known blocks up to h; 0: with none. It
// returns how many of the latest abi.SharedOf conversations begin with the same blocks: 0 for h = 0.
// While fewer conversations have begun, Add counts them and extrapolates. It allocates nothing.
func (b *Begun) Add(h kvindex.Hash) (same uint32) {
	before := b.next.Add(1) - 1
	if h != 0 {
		for i := range b.ring {
			if b.ring[i].Load() == uint64(h) {
				same++
			}
		}
	}
	b.ring[before%abi.SharedOf].Store(uint64(h))
	if before > 0 && before < abi.SharedOf {
		same = same * abi.SharedOf / before
	}
	return min(same, abi.SharedOf)
}
