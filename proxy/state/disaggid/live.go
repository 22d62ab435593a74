package disaggid

import "sync"

// shards is the number of locks of a Live; a power of two.
const shards = 64

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
	s := l.of(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holders[id] > 0 {
		return false
	}
	s.hold(id)
	return true
}

// Hold adds a holder of an id, in flight or not.
func (l *Live) Hold(id uint64) {
	s := l.of(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hold(id)
}

// Drop removes one holder; the last one removes the id.
func (l *Live) Drop(id uint64) {
	s := l.of(id)
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

// hold adds a holder; s.mu is held.
func (s *liveShard) hold(id uint64) {
	if s.holders == nil {
		s.holders = make(map[uint64]int32)
	}
	s.holders[id]++
}

// of returns the shard of an id, by the high bits of a product, because the low bits of
// ids that are minted slowly are equal.
func (l *Live) of(id uint64) *liveShard {
	return &l.shard[id*0x9e3779b97f4a7c15>>58]
}
