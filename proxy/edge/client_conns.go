package edge

import (
	"sync"
)

// clientConns is the set of the open TCP connections of one kind of client. Safe for concurrent use.
type clientConns struct {
	mu     sync.Mutex
	conns  map[*framingConn]bool // guarded by mu
	goAway bool                  // new connections get GOAWAY, too; guarded by mu
}

func (s *clientConns) add(c *framingConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns == nil {
		s.conns = make(map[*framingConn]bool)
	}
	s.conns[c] = true
	if s.goAway {
		c.away.wanted.Store(true)
	}
}

func (s *clientConns) remove(c *framingConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

// sendGoAway sends GOAWAY on all connections of HTTP/2, also on later ones. It starts
// goroutines in wg, which end with their connections at the latest.
func (s *clientConns) sendGoAway(wg *sync.WaitGroup) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.goAway = true
	for c := range s.conns {
		c.away.wanted.Store(true)
		if c.http2.Load() {
			wg.Go(func() { c.away.put(c.Conn) }) // the client may not read
		}
	}
}
