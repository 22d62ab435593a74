package buffer

import (
	"errors"
	"sync"
)

// ErrShare says that the client holds as much of the budget as one client may.
var ErrShare = errors.New("the client's part of the memory for buffers is used up")

// freeShare is how many bytes one request holds before they count for its client:
// ordinary requests never touch what the clients share.
const freeShare = 256 << 10

// Clients counts what each client holds by its large requests. Safe for concurrent
// use. The zero value is ready.
type Clients struct {
	mu   sync.Mutex
	held map[string]int64 // guarded by mu; bytes; none is 0
}

// add counts n bytes for a client; false means that it would hold more than most,
// and nothing is counted. 0 is no limit.
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

// Len is how many clients are counted now.
func (c *Clients) Len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.held)
}

// Share is what one request holds of a budget. While that is more than 256 KiB it
// counts for the request's client, who may hold half of the budget. Safe for
// concurrent use, except Open.
type Share struct {
	budget  *Budget
	clients *Clients // nil: one client may hold everything
	client  string

	mu      sync.Mutex
	held    int64 // guarded by mu; bytes
	counted int64 // guarded by mu; bytes of held that count for the client
}

// Open begins the share of another request; nil clients set no limit. Nothing may be
// held.
func (s *Share) Open(budget *Budget, clients *Clients, client string) {
	s.budget, s.clients, s.client = budget, clients, client
}

// Held is how many bytes are held now.
func (s *Share) Held() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held
}

// Most is how many bytes the request may hold where its client holds nothing else; 0
// is no limit.
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

// Take counts n bytes. The error is ErrFull or ErrShare, and nothing is counted then.
// The caller gives the bytes back by Release.
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

// Release gives back n bytes that were taken.
func (s *Share) Release(n int64) { s.add(-n) }

// add counts n bytes whatever the limits.
func (s *Share) add(n int64) {
	s.budget.add(n)
	s.count(n, 0) // last: a share that holds nothing may be opened anew
}

// count adds n bytes to the share, and tells the client's count of the change. False:
// the client would hold more than most, and nothing has changed.
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
