package grpcserver

import (
	"math"
	"sync"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/proxy/buffer"
)

const (
	// memoryShare is the divisor of the budget for the bytes of messages.
	memoryShare = 4
	// messageCost is the memory of a message beside its bytes.
	messageCost = 128
)

// memory counts the memory of the messages of all clients: from the moment before it is allocated
// until the handler has released it. Above the limit, memory ends streams: first those of the
// connection with the most bytes. Safe for concurrent use.
type memory struct {
	budget *buffer.Budget // counts the bytes too
	least  int64          // bytes: the limit is not below, so that one stream can always be served
	server *Server

	held   atomic.Int64 // bytes
	ending atomic.Int64 // bytes of held that belong to streams that were told to end

	mu sync.Mutex // one goroutine enforces the limit
}

// limit returns the largest number of bytes.
func (m *memory) limit() int64 {
	whole := m.budget.Limit()
	if whole == 0 {
		return math.MaxInt64 / 2
	}
	return min(max(whole/memoryShare, m.least), whole)
}

// enforce ends streams while there are too many bytes. Their memory is free some time later. If
// the memory reaches twice the limit, for example because a client does not read the ends,
// enforce closes the connection with the most bytes.
func (m *memory) enforce() {
	limit := m.limit()
	if m.held.Load()-m.ending.Load() <= limit && m.held.Load() <= 2*limit {
		return
	}
	m.mu.Lock()
	var ended []*Stream
	for {
		c, bytes := m.most(func(c *conn) int64 { return c.held - c.ending })
		if bytes <= limit {
			break
		}
		s := c.choose()
		if s == nil {
			break
		}
		ended = append(ended, s)
	}
	var closed *conn
	if c, bytes := m.most(func(c *conn) int64 { return c.held }); bytes > 2*limit {
		closed = c
	}
	m.mu.Unlock()
	for _, s := range ended {
		s.outOfMemory()
	}
	if closed != nil {
		go closed.nc.Close() // the end of TLS may wait for a client that does not read
	}
}

// most returns the connection with the most bytes, as of counts them, and the bytes of all
// connections; nil: no connection has bytes. The sum leaves out connections that are closing, so that
// no other connection ends because of their bytes.
func (m *memory) most(of func(*conn) int64) (found *conn, sum int64) {
	most := int64(0)
	for _, c := range m.server.all() {
		c.mu.Lock()
		n := of(c)
		c.mu.Unlock()
		if sum += n; n > most {
			found, most = c, n
		}
	}
	return found, sum
}

// count changes the memory of s by n bytes. The caller holds c.mu.
func (c *conn) count(s *Stream, n int64) {
	m := &c.server.memory
	s.held += n
	c.held += n
	if s.ending {
		c.ending += n
		m.ending.Add(n)
	}
	m.held.Add(n)
	m.budget.Add(n)
}

// reserve counts n bytes for a message of s, before they are allocated. It returns false if the
// stream has ended or must end: nobody needs the message.
func (c *conn) reserve(s *Stream, n int64) bool {
	c.mu.Lock()
	if !s.open || s.ending {
		c.mu.Unlock()
		return false
	}
	c.count(s, n)
	c.mu.Unlock()
	c.server.memory.enforce()
	return true
}

// choose returns the stream that must end: of the streams with at least half as many bytes as the
// largest one, the newest. So the older ones make progress. nil: none.
func (c *conn) choose() *Stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	most := int64(0)
	for _, s := range c.streams {
		if !s.ending {
			most = max(most, s.held)
		}
	}
	var chosen *Stream
	for _, s := range c.streams {
		if !s.ending && s.held >= (most+1)/2 && (chosen == nil || s.id > chosen.id) {
			chosen = s
		}
	}
	if chosen != nil {
		c.ends(chosen)
	}
	return chosen
}

// ends records that s ends: its memory will soon be free. The caller holds c.mu.
func (c *conn) ends(s *Stream) {
	if !s.ending {
		s.ending = true
		c.ending += s.held
		c.server.memory.ending.Add(s.held)
	}
}

// outOfMemory ends a stream. If its first message would begin a request, the handler answers it.
func (s *Stream) outOfMemory() {
	c := s.conn
	c.mu.Lock()
	full, begun := s.full, s.begun
	if !begun && s.open && s.method.Request {
		c.begin(s, ErrMemory)
		c.mu.Unlock()
		c.server.workers.run(s)
		return
	}
	c.mu.Unlock()
	switch {
	case !begun:
		c.fail(s, ErrMemory)
	case full == nil || !full():
		s.cancel(ErrMemory)
	}
}
