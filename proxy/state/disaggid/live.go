package disaggid

import "sync"

// shards is the number of locks of a Live; a power of two.
const shards = 64

// Live is the set of ids in flight, with the number of their holders: an
// exchange whose decode leg moves to another engine holds its id twice for a
// moment. The zero value is empty and ready for use, by many goroutines.
type Live struct {
	shard [shards]liveShard
}

type liveShard struct {
	mu      sync.Mutex
	holders map[uint64]int32 // guarded by mu
	_       [48]byte         // keeps the locks on cache lines of their own
}

// Add takes a newly minted id into the set. It is false, and changes nothing,
// when the id is in flight: two transfers under one id never complete.
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

// Drop takes one holder away; the last one takes the id out of the set.
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

// Len is the number of ids in flight.
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

// of spreads ids over the shards by their high product bits: the low bits of
// ids minted slowly are all alike.
func (l *Live) of(id uint64) *liveShard {
	return &l.shard[id*0x9e3779b97f4a7c15>>58]
}
