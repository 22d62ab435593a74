package fleet

import (
	"time"
	"unsafe"

	"google.golang.org/protobuf/proto"

	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// Topic is a value that a coordinator publishes to its workers.
type Topic uint8

// The topics. Server and Client use TopicForms; the others are opaque to them.
const (
	TopicForms      Topic = iota // the coordinator's Demand
	TopicMembership              // the engines
	TopicLoads                   // their loads
	TopicPairs                   // the state of pairs of engines
	TopicIDs                     // the ranges of disagg ids of all workers
	topics
)

// Numbers translates between instances of this process and the coordinator's numbers for
// them.
type Numbers interface {
	// Number returns the coordinator's number of an instance; false: it has none.
	Number(*engine.Instance) (uint32, bool)
	// Instance returns the instance of that number; nil: it is unknown here.
	Instance(uint32) *engine.Instance
}

// kindOf is the kind of a frame.
func kindOf(k fleetpb.Kind) uint8 { return uint8(k) }

// maxRecords bounds the records of a message; see fleetpb.Unmarshal.
const maxRecords = 1 << 16

// decode decodes a message. what names it in the error, which ends the connection.
func decode(payload []byte, m proto.Message, what string) error {
	if fleetpb.Unmarshal(payload, m, maxRecords) != nil {
		return link.Garbage(what)
	}
	return nil
}

// Targets on the wire: see fleet.proto.

func numberOf(instance uint32, rank int) uint64 { return uint64(uint32(rank))<<32 | uint64(instance) }

// putTarget returns the number of a target; false: its instance has no number.
func putTarget(t engine.Target, n Numbers) (target uint64, ok bool) {
	if t.IsZero() {
		return 0, true
	}
	number, ok := n.Number(t.Instance)
	if !ok || number == 0 {
		return 0, false
	}
	return numberOf(number, t.Rank), true
}

// getTarget returns the target of a number. known is false if its instance is unknown here or
// has fewer ranks.
func getTarget(target uint64, n Numbers) (t engine.Target, known bool) {
	number, rank := uint32(target), target>>32
	if number == 0 {
		return engine.Target{}, true
	}
	i := n.Instance(number)
	if i == nil || rank >= uint64(len(i.Load)) {
		return engine.Target{}, false
	}
	return engine.Target{Instance: i, Rank: int(rank)}, true
}

// hashes and numbers return the same memory as another type.
func hashes(v []uint64) []kvindex.Hash {
	return unsafe.Slice((*kvindex.Hash)(unsafe.SliceData(v)), len(v))
}

func numbers(v []kvindex.Hash) []uint64 {
	return unsafe.Slice((*uint64)(unsafe.SliceData(v)), len(v))
}

// maxMicros is the longest duration of a message, in µs. Longer ones are cut.
const maxMicros = uint64(24 * time.Hour / time.Microsecond)

func microsOf(d time.Duration) uint64 { return min(uint64(max(0, d.Microseconds())), maxMicros) }

func durationOf(micros uint64) time.Duration {
	return time.Duration(min(micros, maxMicros)) * time.Microsecond
}

// maxBlock is the largest block. Engines report the size.
const maxBlock = 1<<31 - 1

func blockOf(block int) uint32 { return uint32(min(max(0, block), maxBlock)) }

// names interns texts that repeat. It is for one goroutine.
type names map[string]string

// maxNames and maxNameSize bound the stored texts, because clients choose some of them.
const (
	maxNames    = 1024
	maxNameSize = 256
)

func (n names) of(text string) string {
	if text == "" {
		return ""
	}
	if s, ok := n[text]; ok {
		return s
	}
	s := string([]byte(text)) // text aliases a message
	if len(s) > maxNameSize {
		return s
	}
	if len(n) >= maxNames {
		clear(n)
	}
	n[s] = s
	return s
}
