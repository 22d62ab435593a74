package buffer

import (
	"errors"
	"sync"
)

// ErrShare reports that the client already holds as much of the budget as one client may hold.
var ErrShare = errors.New("the client's part of the memory for buffers is used up")

// freeShare is the number of bytes that one request may hold before they count for its
// client, so that ordinary requests do not use the shared counters.
const freeShare = 256 << 10

// Clients counts the bytes that each client's large requests hold. It is safe for
// concurrent use. The zero value is ready for use.
type Clients struct {
	mu   sync.Mutex
	held map[string]int64 // guarded by mu; in bytes; no entry is 0
}

// add counts n bytes for a client. It returns false and counts nothing if the client
// would hold more than most; 0 means no limit.
func (c *Clients) add(name string, n, most int64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	held := c.held[name] + n
	switch {
	case most > 0 && held > most:
		return false
	case held == 0:
		delete(c.held, name)
	case c.held == nil:
		c.held = map[string]int64{name: held}
	default:
		c.held[name] = held
	}
	return true
}

// Share is the part of a budget that one request holds. Above 256 KiB it counts for the
// request's client, which may hold half of the budget. Safe for concurrent use, except
// Open.
type Share struct {
	budget  *Budget
	clients *Clients // nil: one client may hold the whole budget
	client  string

	mu      sync.Mutex
	held    int64 // guarded by mu; bytes
	counted int64 // bytes of held that count for the client; guarded by mu
}

// Open begins the share of another request. nil clients set no limit. The share must
// not hold bytes.
func (s *Share) Open(budget *Budget, clients *Clients, client string) {
	s.budget, s.clients, s.client = budget, clients, client
}

// Held returns the number of held bytes.
func (s *Share) Held() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held
}

// Most returns the number of bytes that the request may hold if its client holds
// nothing else; 0 means no limit.
func (s *Share) Most() int64 {
	limit := s.budget.Limit()
	if s.clients != nil && limit > 0 {
		return max(limit/2, freeShare)
	}
	return limit
}

// Get returns an empty buffer with room for n bytes, which counts until it is freed.
// The error is ErrFull or ErrShare.
func (s *Share) Get(n int) (*Buffer, error) { return get(s, n) }

// Take counts n bytes. On ErrFull or ErrShare it counts nothing. The caller returns the
// bytes by Release.
func (s *Share) Take(n int64) error { return s.take(n) }

func (s *Share) take(n int64) error {
	if !s.count(n, s.Most()) {
		return ErrShare
	}
	if !s.budget.Take(n) {
		s.count(-n, 0)
		return ErrFull
	}
	return nil
}

// Release returns n bytes that were taken.
func (s *Share) Release(n int64) { s.add(-n) }

// add counts n bytes regardless of the limits.
func (s *Share) add(n int64) {
	s.budget.add(n)
	s.count(n, 0) // last: an empty share may be opened again
}

// count adds n bytes to the share, and adds the change to the client's count. It
// returns false and changes nothing if the client would hold more than most.
func (s *Share) count(n, most int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	held, counts := s.held+n, int64(0)
	if s.clients != nil && held > freeShare {
		counts = held
	}
	if d := counts - s.counted; d != 0 {
		if d < 0 {
			most = 0
		}
		if !s.clients.add(s.client, d, most) {
			return false
		}
	}
	s.held, s.counted = held, counts
	return true
}
