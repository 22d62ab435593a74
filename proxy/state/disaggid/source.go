package disaggid

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// maxWorker is the highest worker number that the layout has room for.
const maxWorker = 1<<workerBits - 1

// Source hands out facts that are unique for its node and worker: no two have
// the same time and counter. Its time is the wall clock as it stood at New plus
// what the monotonic clock has counted since, so it never goes back while the
// process lives, whatever is done to the host's clock.
type Source struct {
	node, worker uint8
	start        time.Time
	last         atomic.Int64 // Unix ms << counterBits | counter of the last facts
}

// New returns the source of the given node (0 to 255) and worker (0 to 63).
// Two processes that share engines must differ in one of them.
func New(node, worker int) (*Source, error) {
	if node < 0 || node > 1<<nodeBits-1 {
		return nil, fmt.Errorf("create id source: node %d is not in 0 to %d", node, 1<<nodeBits-1)
	}
	if worker < 0 || worker > maxWorker {
		return nil, fmt.Errorf("create id source: worker %d is not in 0 to %d", worker, maxWorker)
	}
	return &Source{node: uint8(node), worker: uint8(worker), start: time.Now()}, nil
}

// Next returns the next facts. When the 1024 of a millisecond are used up it
// blocks until the next one begins; the counter never wraps.
func (s *Source) Next() abi.MintFacts {
	for {
		now := s.now()
		last := s.last.Load()
		next := now.UnixMilli() << counterBits
		if next <= last {
			next = last + 1
			if next&(1<<counterBits-1) == 0 {
				time.Sleep(now.Truncate(time.Millisecond).Add(time.Millisecond).Sub(now))
				continue
			}
		}
		if s.last.CompareAndSwap(last, next) {
			return abi.MintFacts{
				UnixMilli: next >> counterBits,
				Node:      s.node,
				Worker:    s.worker,
				Counter:   uint16(next & (1<<counterBits - 1)),
			}
		}
	}
}

// now is the source's own clock.
func (s *Source) now() time.Time { return s.start.Add(time.Since(s.start)) }
