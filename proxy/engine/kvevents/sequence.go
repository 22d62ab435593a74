package kvevents

import "github.com/zeebo/xxh3"

// remembered is how many of the last batches a sequence can tell again.
const remembered = 256

// sequence follows the numbers of one publisher's batches: from 0 with the
// engine's start, one more for each. It holds the digests of the last batches,
// for the number alone does not tell a batch that came twice from one of an
// engine that started again. The zero value knows nothing yet.
type sequence struct {
	next   uint64 // the number after the last one taken
	known  bool
	recent [remembered]digest // that of batch n at n modulo remembered
}

// digest is of a batch with its number; 0 if that batch never came.
type digest uint64

func digestOf(seq uint64, payload []byte) digest {
	return digest(xxh3.HashSeed(payload, seq) | 1)
}

// verdict is what a batch's number says.
type verdict uint8

const (
	inOrder verdict = iota // the next one, or the first ever
	seenBefore
	ahead  // batches are missing before it
	behind // the engine started again
)

// judge says what to do with a batch. A number below the next one is that of a
// batch that was taken before, of one that was given up as lost and comes late,
// or of an engine that counts again from the start.
func (s *sequence) judge(seq uint64, payload []byte) verdict {
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

// take notes that the batch was taken. The ones that its number passes over are
// lost.
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

// last reports whether the batch is the last one that was taken: then its
// sender is the engine of before.
func (s *sequence) last(seq uint64, payload []byte) bool {
	return s.known && seq+1 == s.next && s.recent[seq%remembered] == digestOf(seq, payload)
}

// forget makes the next batch the first ever.
func (s *sequence) forget() { s.known = false }
