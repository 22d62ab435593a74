package fleet

import (
	"encoding/binary"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/wire"
)

// The kinds of frames between a worker and the coordinator. A kind without a note is a
// message of the worker.
const (
	kindPlace    = iota + 1 // call of the worker: place a request
	kindDone                // the prompt of a lease is computed; has the lease's clean-up from then on
	kindAnswered            // the leg that answers has the prompt's KV
	kindComputed            // how much of a prompt was cached
	kindRelease             // a lease has ended
	kindAdopt               // a lease that this coordinator did not make
	kindReport              // a report about engines
	kindTopic               // message of the coordinator: the value of a topic
	kindHomes               // call of a standby: homes of conversations
	kindAsk                 // call of the coordinator: a request to the worker's admin routes
	kindNamed               // call of the worker: is a turn of that name retained?
	kindKeep                // call of the worker: store this turn
	kindKept                // call of the worker: the stored turn is yours
	kindTake                // call of the worker: show a turn
	kindTook                // call of the worker: the shown turn is mine
	kindUntake              // the worker does not complete the passing of a turn
	kindBudget              // call of the worker: a part of a tenant's budgets
	kindSettle              // what a request has used of that part
	kindCharge              // what the worker has given without asking, or got from another coordinator
	kindKnown               // the newest states of budgets that the worker knows
	kindBudgets             // message of the coordinator, also to standbys: states of budgets
	kindOwed                // the clean-up of a lease whose prompt is not computed yet
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

// Package wire defines the encoding of numbers, texts and lists. A target is the number
// of its instance and its rank; no target is the number 0.

func appendHashes(dst []byte, blocks []kvindex.Hash) []byte {
	dst = wire.AppendUint(dst, len(blocks))
	for _, h := range blocks {
		dst = binary.LittleEndian.AppendUint64(dst, uint64(h))
	}
	return dst
}

// appendTarget appends a target; false: its instance has no number.
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

// reader adds the values of this package to wire.Reader.
type reader struct{ wire.Reader }

func newReader(message []byte) reader { return reader{wire.Read(message)} }

func (r *reader) hashes(dst []kvindex.Hash) []kvindex.Hash {
	b := r.Bytes(uint64(r.List(8)) * 8)
	for ; len(b) >= 8; b = b[8:] {
		dst = append(dst, kvindex.Hash(binary.LittleEndian.Uint64(b)))
	}
	return dst
}

// headerCount reads the length of a list of request headers.
func (r *reader) headerCount() int {
	n := r.List(1)
	if n > abi.MaxAllHeaders {
		r.Fail()
		return 0
	}
	return n
}

// short reads a text of at most that many bytes.
func (r *reader) short(most int) []byte {
	text := r.Text()
	if len(text) > most {
		r.Fail()
		return nil
	}
	return text
}

// target reads a target. known is false if its instance is unknown here or has fewer
// ranks.
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

// names interns texts that repeat. It is for one goroutine.
type names map[string]string

// mostNames and longestName bound the stored texts, because clients choose some of them.
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
