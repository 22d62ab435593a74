package edge

import (
	"encoding/binary"
	"net"
	"sync"
	"sync/atomic"
)

// goAwayFrame instructs an HTTP/2 client to open no more streams on this connection. It names the
// highest possible stream, so that the streams that the client has just opened are served (RFC 9113
// 6.8). The GOAWAY of net/http names the last stream that net/http has seen, and net/http drops
// later streams.
var goAwayFrame = []byte{0, 0, 8, 7, 0, 0, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0}

// frameHead is the length of an HTTP/2 frame's head.
const frameHead = 9

// goAway writes a goAwayFrame between two frames of net/http. The zero value is in front of the
// first frame, which must come from net/http.
type goAway struct {
	wanted atomic.Bool
	mu     sync.Mutex // held during a write
	head   [frameHead]byte
	n      int    // bytes of head; guarded by mu
	left   uint32 // bytes of the payload still to come; guarded by mu
	begun  bool   // one whole frame has been written; guarded by mu
	sent   bool   // guarded by mu
}

// write writes bytes of net/http.
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

// put writes the frame if the connection is between two frames. If another goroutine writes now,
// that goroutine calls put afterwards.
func (g *goAway) put(c net.Conn) {
	if !g.mu.TryLock() {
		return
	}
	defer g.mu.Unlock()
	if g.begun && g.n == 0 && g.left == 0 && !g.sent {
		g.sent = true
		_, _ = c.Write(goAwayFrame) // net/http notices a broken connection itself
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
