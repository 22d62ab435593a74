package buffer

import (
	"errors"
	"sync"
	"sync/atomic"
)

var (
	// ErrFull reports that the budget has no room for the requested bytes.
	ErrFull = errors.New("the memory for buffers is used up")
	// ErrShare reports that the client already holds as much of the budget as one client may hold.
	ErrShare = errors.New("the client's part of the memory for buffers is used up")
)

// Budget counts held bytes up to a limit. The zero value and nil have no limit. All
// methods are safe for concurrent use and take no lock.
type Budget struct {
	limit atomic.Int64 // bytes; 0: none
	_     [56]byte     // every request writes used: keep it on another cache line than limit
	used  atomic.Int64 // bytes
}

// SetLimit sets the limit in bytes; 0 means none. Bytes that are already held stay.
func (g *Budget) SetLimit(n int64) { g.limit.Store(n) }

// Limit returns the limit in bytes; 0 means none.
func (g *Budget) Limit() int64 { return g.limit.Load() }

// Used returns the number of counted bytes.
func (g *Budget) Used() int64 { return g.used.Load() }

// Take counts n bytes. It returns false and counts nothing if there is no room. The
// caller returns the bytes by Release.
func (g *Budget) Take(n int64) bool { return g.take(n) == nil }

func (g *Budget) take(n int64) error {
	if g == nil {
		return nil
	}
	used, limit := g.used.Add(n), g.limit.Load()
	if limit > 0 && used > limit {
		g.used.Add(-n)
		return ErrFull
	}
	return nil
}

// Release returns n bytes that were taken. A negative n counts bytes regardless of the limit.
func (g *Budget) Release(n int64) {
	if g != nil {
		g.used.Add(-n)
	}
}

// Add counts n bytes regardless of the limit. A negative n returns bytes.
func (g *Budget) Add(n int64) { g.Release(-n) }

// freeShare is the number of bytes that one request may hold before they count for its
// client, so that ordinary requests do not use the shared counters.
const freeShare = 256 << 10

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

// Take counts n bytes. On ErrFull or ErrShare it counts nothing. The caller returns the
// bytes by Release.
func (s *Share) Take(n int64) error { return s.take(n) }

func (s *Share) take(n int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clients != nil && s.held+n > freeShare && !s.count(s.held+n, s.Most()) {
		return ErrShare
	}
	if err := s.budget.take(n); err != nil {
		if s.counted > 0 {
			s.count(s.held, 0)
		}
		return err
	}
	s.held += n
	return nil
}

// Release returns n bytes that were taken. A negative n counts bytes regardless of the limits.
func (s *Share) Release(n int64) {
	s.budget.Release(n)
	s.mu.Lock() // last: an empty share may be opened again
	defer s.mu.Unlock()
	s.held -= n
	if s.counted > 0 || s.clients != nil && s.held > freeShare {
		s.count(s.held, 0)
	}
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

// count makes the client's count follow a share of held bytes. It returns false and
// changes nothing if the client would hold more than most; 0 means no limit. mu is held.
func (s *Share) count(held, most int64) bool {
	counts := int64(0)
	if held > freeShare {
		counts = held
	}
	if d := counts - s.counted; d != 0 && !s.clients.add(s.client, d, most) {
		return false
	}
	s.counted = counts
	return true
}

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
