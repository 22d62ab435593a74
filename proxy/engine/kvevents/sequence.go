package kvevents

import "github.com/zeebo/xxh3"

// remembered is the number of recent batches that a sequence recognizes.
const remembered = 256

// sequence follows the numbers of one publisher's batches: 0 at the engine's start,
// then one more for each. It holds the digests of the recent batches, because the
// number alone does not distinguish a repeated batch from one of a restarted engine.
// The zero value knows no batch.
type sequence struct {
	next   uint64 // one more than the last applied number
	known  bool
	recent [remembered]digest // digest of batch n at index n modulo remembered
}

// digest is the digest of a batch with its number; 0 if that batch never arrived.
type digest uint64

func digestOf(seq uint64, payload []byte) digest {
	return digest(xxh3.HashSeed(payload, seq) | 1)
}

// order is the position of a batch in the sequence.
type order uint8

const (
	inOrder order = iota // the next batch, or the first one
	seenBefore
	ahead  // batches are missing before it
	behind // the engine has restarted
)

// classify returns the position of a batch. A number below the next one belongs to an
// applied batch, to a late batch that was counted as lost, or to a restarted engine.
func (s *sequence) classify(seq uint64, payload []byte) order {
	switch {
	case !s.known || seq == s.next:
		return inOrder
	case seq > s.next:
		return ahead
	case s.next-seq > remembered:
		return behind
	}
	d := s.recent[seq%remembered]
	if d == digestOf(seq, payload) || d == 0 && seq > 0 {
		return seenBefore
	}
	return behind
}

// take notes that the batch was applied. The skipped numbers are lost.
func (s *sequence) take(seq uint64, payload []byte) {
	if !s.known || seq < s.next || seq-s.next >= remembered {
		clear(s.recent[:])
	} else {
		for n := s.next; n < seq; n++ {
			s.recent[n%remembered] = 0
		}
	}
	s.recent[seq%remembered] = digestOf(seq, payload)
	s.next, s.known = seq+1, true
}

// last reports whether the batch is the one that was applied last: then its sender is
// the same engine process.
func (s *sequence) last(seq uint64, payload []byte) bool {
	return s.known && seq+1 == s.next && s.recent[seq%remembered] == digestOf(seq, payload)
}

// forget makes the next batch count as the first.
func (s *sequence) forget() { s.known = false }
