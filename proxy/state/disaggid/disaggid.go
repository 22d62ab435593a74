// Package disaggid issues the numbers that disagg ids are made of, and records which ids are in
// flight. An issuer (Ranges) splits reserved blocks into ranges, each for one Source, which counts
// through it. The package does no I/O and is safe for concurrent use.
//
// The decisions behind this package are in docs/design/connectors.md.
package disaggid

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// The layout of an id before it is brought into range, from the highest bit: 39
// bits of milliseconds since abi.DisaggEpochMilli, 8 of node, 6 of worker, 10
// of counter, which carries into the milliseconds: a Source counts. Source:
// TensorRT-LLM tensorrt_llm/llmapi/disagg_utils.py, whose time is the host's
// uptime instead, so that its ids repeat after a reboot.
const (
	milliBits   = 39
	nodeBits    = 8
	workerBits  = 6
	counterBits = 10

	workerShift = counterBits
	nodeShift   = workerShift + workerBits
	milliShift  = nodeShift + nodeBits
)

// Pack is the native rule that makes an id from the facts: the layout above, moved into
// [abi.MinDisaggID, abi.MaxDisaggID).
func Pack(f abi.MintFacts) uint64 {
	raw := uint64(f.UnixMilli-abi.DisaggEpochMilli)&(1<<milliBits-1)<<milliShift |
		uint64(f.Node)<<nodeShift |
		uint64(f.Worker)&(1<<workerBits-1)<<workerShift |
		uint64(f.Counter)&(1<<counterBits-1)
	return raw%(abi.MaxDisaggID-abi.MinDisaggID) + abi.MinDisaggID
}

// InRange reports whether engines accept the id.
func InRange(id uint64) bool { return id >= abi.MinDisaggID && id < abi.MaxDisaggID }

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

// shards is the number of locks of a Live. The high 6 bits of the product of an id and spread
// choose one of them, because the low bits of ids that are minted slowly are equal.
const (
	shards        = 64
	spread uint64 = 0x9e3779b97f4a7c15
)

// Live is the set of ids in flight, with the number of their holders: an exchange whose
// decode leg moves to another engine holds its id twice for a moment. The zero value is an
// empty set. Safe for concurrent use.
type Live struct {
	shard [shards]liveShard
}

type liveShard struct {
	mu      sync.Mutex
	holders map[uint64]int32 // guarded by mu
	_       [48]byte         // puts each lock on a separate cache line
}

// Add adds a newly minted id. False: the id is in flight, and nothing changes. Two
// transfers with one id would never complete.
func (l *Live) Add(id uint64) bool {
	s := &l.shard[id*spread>>58]
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holders[id] > 0 {
		return false
	}
	if s.holders == nil {
		s.holders = make(map[uint64]int32)
	}
	s.holders[id] = 1
	return true
}

// Hold adds a holder of an id, in flight or not.
func (l *Live) Hold(id uint64) {
	s := &l.shard[id*spread>>58]
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holders == nil {
		s.holders = make(map[uint64]int32)
	}
	s.holders[id]++
}

// Drop removes one holder; the last one removes the id.
func (l *Live) Drop(id uint64) {
	s := &l.shard[id*spread>>58]
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holders[id] > 1 {
		s.holders[id]--
		return
	}
	delete(s.holders, id)
}

// Len returns the number of ids in flight.
func (l *Live) Len() int {
	n := 0
	for i := range l.shard {
		s := &l.shard[i]
		s.mu.Lock()
		n += len(s.holders)
		s.mu.Unlock()
	}
	return n
}
