package disaggid

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// maxWorker is the highest worker number that the layout has room for.
const maxWorker = 1<<workerBits - 1

// Source issues unique facts, range after range. It counts and reads no clock. So it
// never waits and never repeats a fact, even if the clock is set back, the process is
// suspended or requests are very frequent.
type Source struct {
	holder  Holder
	current atomic.Pointer[span]

	mu    sync.Mutex
	next  []Range       // ranges for use when the current range is used up; guarded by mu
	count uint32        // guarded by mu; ranges taken so far
	size  int64         // number of ids in the last range; guarded by mu
	since time.Time     // guarded by mu; when that was
	taken map[int]int64 // guarded by mu; until where each line's id-time has been taken
}

// span is a range in use.
type span struct {
	_            [64]byte     // padding: the counter has a separate cache line
	next         atomic.Int64 // Unix ms << counterBits | counter
	end          int64        // next's limit
	node, worker uint8
}

// left is how many ids the span still has.
func (s *span) left() int64 { return max(0, s.end-s.next.Load()) }

// NewSource returns a source without a range.
func NewSource() *Source {
	s := &Source{holder: Holder(rand.Uint64()), taken: make(map[int]int64)}
	s.current.Store(new(span))
	return s
}

// New returns the source of a process without an issuer of ranges. It holds the rest of
// the line of a node (0 to 255) and worker (0 to 63), from the present time. Processes
// that share engines must differ in one of the two numbers. A later process on the same
// line issues other ids, unless the clock was set back to before the start or the last id
// of the earlier one: 1024 ids use a millisecond.
func New(node, worker int) (*Source, error) {
	if node < 0 || node > 1<<nodeBits-1 {
		return nil, fmt.Errorf("create id source: node %d is not in 0 to %d", node, 1<<nodeBits-1)
	}
	if worker < 0 || worker > maxWorker {
		return nil, fmt.Errorf("create id source: worker %d is not in 0 to %d", worker, maxWorker)
	}
	s := NewSource()
	s.Extend(Range{Node: uint8(node), Worker: uint8(worker), From: Clock(time.Now()), Until: End})
	return s, nil
}

// Next returns the next facts without waiting. False: all ranges are used up.
func (s *Source) Next() (abi.MintFacts, bool) {
	for {
		c := s.current.Load()
		if n := c.next.Add(1) - 1; n < c.end {
			return abi.MintFacts{
				UnixMilli: n >> counterBits,
				Node:      c.node,
				Worker:    c.worker,
				Counter:   uint16(n & (1<<counterBits - 1)),
			}, true
		}
		if !s.advance(c) {
			return abi.MintFacts{}, false
		}
	}
}

// advance replaces a range that is used up by the next one.
func (s *Source) advance(used *span) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.current.Load() != used: // another goroutine did it
	case len(s.next) > 0:
		s.begin(s.next[0])
		s.next = s.next[1:]
	default:
		used.next.Store(used.end) // the counter must not increase without bound
		return false
	}
	return true
}

// begin makes r the range in use; s.mu is held.
func (s *Source) begin(r Range) {
	c := &span{end: r.Until << counterBits, node: r.Node, worker: r.Worker}
	c.next.Store(r.From << counterBits)
	s.current.Store(c)
}

// Extend gives the source a granted range. It is used after the present ranges, or instead
// of them if they are no longer Fresh. Id-time that was given before is ignored, so a
// grant may arrive several times.
func (s *Source) Extend(r Range) {
	s.mu.Lock()
	defer s.mu.Unlock()
	line := int(r.Node)<<workerBits | int(r.Worker)
	if r.Until <= s.taken[line] {
		return
	}
	r.From = max(r.From, s.taken[line])
	s.taken[line] = r.Until
	s.count++
	s.size = r.Size()
	stale := s.stale()
	s.since = time.Now()
	if stale {
		s.next = nil
		s.begin(r)
		return
	}
	s.next = append(s.next, r)
}

// stale reports whether the source has not received a range for a long time. The caller
// holds s.mu.
func (s *Source) stale() bool { return !s.since.IsZero() && time.Since(s.since) >= Fresh }

// Ask returns the request for the next range. The caller may repeat it. False: no request
// is needed, because the last range is younger than Fresh and has more than half of its
// ids left.
func (s *Source) Ask() (Ask, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	left := s.current.Load().left()
	for _, r := range s.next {
		left += r.Size()
	}
	return Ask{Holder: s.holder, Taken: s.count}, 2*left <= s.size || s.stale()
}

// ExtendBy gives the source its range in an encoded table of Ranges.
func (s *Source) ExtendBy(table []byte) error {
	r, ok, err := FindRange(table, s.holder)
	if ok && err == nil {
		s.Extend(r)
	}
	return err
}
