package proxy

import (
	"encoding/binary"
	"net"
	"sync"
	"sync/atomic"
)

// goAwayFrame asks an HTTP/2 client to open no more streams here, and promises that
// those it has just opened are served: its last stream is the highest there can be
// (RFC 9113 6.8). net/http's own GOAWAY names the last stream that it has seen, and
// drops what the client sent before it knew.
var goAwayFrame = []byte{0, 0, 8, 7, 0, 0, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0}

// frameHead is the length of an HTTP/2 frame's head.
const frameHead = 9

// goAway puts a goAwayFrame between two frames that net/http writes. The zero value
// stands before the first frame, which has to be net/http's.
type goAway struct {
	wanted atomic.Bool
	mu     sync.Mutex // held while something is written
	head   [frameHead]byte
	n      int    // bytes of head; guarded by mu
	left   uint32 // bytes of the payload still to come; guarded by mu
	begun  bool   // a frame has been written whole; guarded by mu
	sent   bool   // guarded by mu
}

// write writes what is net/http's.
func (g *goAway) write(c net.Conn, p []byte) (int, error) {
	g.mu.Lock()
	n, err := c.Write(p)
	g.follow(p[:n])
	g.mu.Unlock()
	if err == nil && g.wanted.Load() {
		g.put(c)
	}
	return n, err
}

// put writes the frame, if this is the time. Whoever writes just now does it after
// that.
func (g *goAway) put(c net.Conn) {
	if !g.mu.TryLock() {
		return
	}
	defer g.mu.Unlock()
	if g.begun && g.n == 0 && g.left == 0 && !g.sent {
		g.sent = true
		_, _ = c.Write(goAwayFrame) // a broken connection shows elsewhere
	}
}

// follow keeps track of where frames end.
func (g *goAway) follow(p []byte) {
	for len(p) > 0 {
		if g.left > 0 {
			step := min(int(g.left), len(p))
			p = p[step:]
			if g.left -= uint32(step); g.left == 0 {
				g.begun = true
			}
			continue
		}
		step := copy(g.head[g.n:], p)
		p = p[step:]
		if g.n += step; g.n < frameHead {
			return
		}
		g.n = 0
		g.left = binary.BigEndian.Uint32(g.head[:]) >> 8
		g.begun = g.begun || g.left == 0
	}
}

// clientConns are the connections of a front's clients over TCP. Safe for
// concurrent use.
type clientConns struct {
	mu       sync.Mutex
	conns    map[*framingConn]bool // guarded by mu
	retiring bool                  // guarded by mu
}

func (s *clientConns) add(c *framingConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns == nil {
		s.conns = make(map[*framingConn]bool)
	}
	s.conns[c] = true
	if s.retiring {
		c.away.wanted.Store(true)
	}
}

func (s *clientConns) remove(c *framingConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

// retire tells all clients of HTTP/2, those to come too. What it starts ends with
// the connections, and is waited for by wg.
func (s *clientConns) retire(wg *sync.WaitGroup) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.retiring = true
	for c := range s.conns {
		c.away.wanted.Store(true)
		if c.http2.Load() {
			wg.Go(func() { c.away.put(c.Conn) }) // the client may not be reading
		}
	}
}
