package fleet

import (
	"encoding/binary"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/wire"
)

// The kinds of frames between a worker and the coordinator.
const (
	kindPlace    = iota + 1 // call of the worker's: a placement
	kindDone                // the prompt of a lease is computed
	kindAnswered            // the leg that answers has the prompt's KV
	kindComputed            // how much of a prompt was cached
	kindRelease             // the end of a lease
	kindAdopt               // a lease that the coordinator has not made
	kindReport              // what a worker tells of engines
	kindTopic               // message of the coordinator's: the latest of a topic
	kindHomes               // call of a standby's: homes of conversations
	kindAsk                 // call of the coordinator's: a request to the worker's admin surface
	kindNamed               // call of the worker's: whether a turn of that name is kept
	kindKeep                // call of the worker's: it shows a turn that is to be kept
	kindKept                // call of the worker's: it lets go of that
	kindTake                // call of the worker's: it is shown a turn that is kept
	kindTook                // call of the worker's: it has that
	kindUntake              // it will not say so any more
)

// Topic is what a coordinator keeps its workers informed of.
type Topic uint8

// The topics. Forms is the coordinator's own; the others mean nothing to it.
const (
	TopicForms      Topic = iota // what policies need to be shown
	TopicMembership              // the engines
	TopicLoads                   // what they carry
	TopicPairs                   // what is known of pairs of them
	TopicIDs                     // the range of disagg ids that the worker mints from
	topics
)

// Numbers translates between the coordinator's numbers of instances and a
// worker's instances.
type Numbers interface {
	// Number is the coordinator's number of an instance; false: it has none.
	Number(*engine.Instance) (uint32, bool)
	// Instance is the instance of that number; nil: there is none here.
	Instance(uint32) *engine.Instance
}

// Texts and lists go over the wire with their length before them, numbers as
// varints: unsigned ones as they are, signed ones in zigzag. A target is its
// instance's number and its rank, no target the number 0 alone.

func appendHashes(dst []byte, blocks []kvindex.Hash) []byte {
	dst = wire.AppendUint(dst, len(blocks))
	for _, h := range blocks {
		dst = binary.LittleEndian.AppendUint64(dst, uint64(h))
	}
	return dst
}

// appendTarget appends a target; false: it has no number.
func appendTarget(dst []byte, t engine.Target, n Numbers) ([]byte, bool) {
	if t.IsZero() {
		return append(dst, 0), true
	}
	number, ok := n.Number(t.Instance)
	if !ok || number == 0 {
		return append(dst, 0), false
	}
	return wire.AppendUint(wire.AppendUint(dst, number), t.Rank), true
}

// reader reads what the functions above appended.
type reader struct{ wire.Reader }

func newReader(message []byte) reader { return reader{wire.Read(message)} }

func (r *reader) hashes(dst []kvindex.Hash) []kvindex.Hash {
	b := r.Bytes(uint64(r.List(8)) * 8)
	for ; len(b) >= 8; b = b[8:] {
		dst = append(dst, kvindex.Hash(binary.LittleEndian.Uint64(b)))
	}
	return dst
}

// target reads a target. known is false when it is none of this side's: its
// instance has gone, or has fewer ranks here.
func (r *reader) target(n Numbers) (t engine.Target, known bool) {
	number := r.UintUpTo(1<<32 - 1)
	if number == 0 {
		return engine.Target{}, true
	}
	rank := r.UintUpTo(1<<31 - 1)
	i := n.Instance(uint32(number))
	if r.Failed() || i == nil || rank >= uint64(len(i.Load)) {
		return engine.Target{}, false
	}
	return engine.Target{Instance: i, Rank: int(rank)}, true
}

// names gives texts that come again and again the same memory. It is for one
// goroutine at a time.
type names map[string]string

// mostNames and longestName bound what is remembered: clients choose some of the
// texts.
const (
	mostNames   = 1024
	longestName = 256
)

func (n names) of(b []byte) string {
	if len(b) > longestName {
		return string(b)
	}
	if s, ok := n[string(b)]; ok {
		return s
	}
	if len(n) >= mostNames {
		clear(n)
	}
	s := string(b)
	n[s] = s
	return s
}
