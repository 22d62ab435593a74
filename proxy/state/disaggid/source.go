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

// Source hands out facts that are unique: those of the ranges that it holds, one
// after the other. It counts and reads no clock, so that no step of the clock,
// no pause of the process and no rate of requests makes it wait or go back.
type Source struct {
	holder  Holder
	current atomic.Pointer[span]

	mu    sync.Mutex
	next  []Range       // guarded by mu; taken when the current one is used up
	count uint32        // guarded by mu; ranges taken so far
	size  int64         // guarded by mu; ids of the one taken last
	since time.Time     // guarded by mu; when that was
	taken map[int]int64 // guarded by mu; until where each line's id-time has been taken
}

// span is a range in use.
type span struct {
	_            [64]byte     // its counter is on a cache line of its own
	next         atomic.Int64 // Unix ms << counterBits | counter
	end          int64        // next's limit
	node, worker uint8
}

// left is how many ids the span still has.
func (s *span) left() int64 { return max(0, s.end-s.next.Load()) }

// NewSource returns a source that has no range yet.
func NewSource() *Source {
	s := &Source{holder: Holder(rand.Uint64()), taken: make(map[int]int64)}
	s.current.Store(new(span))
	return s
}

// New returns the source of a process that nobody grants ranges to: it holds all
// that is left of the line of the given node (0 to 255) and worker (0 to 63),
// from the present time. Two processes that share engines must differ in one of
// them. The one that follows it on its line starts later, and issues ids of its
// own, unless the clock was set back to before this one's start or its use:
// 1024 ids are a millisecond.
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

// Next returns the next facts. It never waits; it is false when every range is
// used up.
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

// advance puts the next range in the place of one that is used up.
func (s *Source) advance(used *span) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.current.Load() != used: // another did
	case len(s.next) > 0:
		s.begin(s.next[0])
		s.next = s.next[1:]
	default:
		used.next.Store(used.end) // it does not count up for ever
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

// Extend gives the source a range that was granted to it, to be used after those
// that it has, or instead of them if they are not Fresh. What it was given before
// is not taken again, so that a grant may arrive any number of times.
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

// stale reports whether nothing has come for long; s.mu is held.
func (s *Source) stale() bool { return !s.since.IsZero() && time.Since(s.since) >= Fresh }

// Ask is what to say to the issuer of ranges, as often as one likes; false as
// long as the range taken last is Fresh and more than half of its ids are left.
func (s *Source) Ask() (Ask, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	left := s.current.Load().left()
	for _, r := range s.next {
		left += r.Size()
	}
	return Ask{Holder: s.holder, Taken: s.count}, 2*left <= s.size || s.stale()
}

// ExtendBy gives the source what an encoded table of Ranges has for it.
func (s *Source) ExtendBy(table []byte) error {
	r, ok, err := FindRange(table, s.holder)
	if ok && err == nil {
		s.Extend(r)
	}
	return err
}
