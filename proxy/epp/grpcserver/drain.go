package grpcserver

import (
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// drainPing is the content of the ping after which a client knows that it shall open no more streams.
var drainPing = [8]byte{'d', 'r', 'a', 'i', 'n'}

// drain tells the client to open no more streams. The connection ends with its last stream. A client
// that has just connected may already have streams for the connection, so it gets the time to begin.
func (c *conn) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.begun {
		c.nc.SetReadDeadline(time.Now().Add(beginTimeout))
		return
	}
	if c.leaving != stays {
		return
	}
	c.leaving = warned
	c.out.control(func(f *http2.Framer) {
		_ = f.WriteGoAway(maxStream, http2.ErrCodeNo, nil)
		_ = f.WritePing(false, drainPing)
	})
}

// maxStream is the largest id of a stream; RFC 9113, section 5.1.1.
const maxStream = 1<<31 - 1

// refuseMore refuses later streams, after the client has had time to read that it shall open none.
func (c *conn) refuseMore() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leaving != warned {
		return
	}
	c.leaving = left
	c.out.control(func(f *http2.Framer) { _ = f.WriteGoAway(c.last, http2.ErrCodeNo, nil) })
	c.closeIfDone()
}

// closeIfDone closes a connection that has refused later streams, after its last stream. The caller
// holds c.mu.
func (c *conn) closeIfDone() {
	if c.leaving == left && c.live == 0 {
		go c.out.close() // ends within closeTimeout
	}
}

// cutUnused ends the streams that have no handler.
func (c *conn) cutUnused() {
	c.endUnused(errCut, func(*Stream) bool { return true })
}

// endUnused ends those streams without a handler that are chosen.
func (c *conn) endUnused(err error, chosen func(*Stream) bool) {
	c.mu.Lock()
	var list []*Stream
	for _, s := range c.streams {
		if !s.begun && chosen(s) {
			list = append(list, s)
		}
	}
	c.mu.Unlock()
	for _, s := range list {
		c.end(s, err)
	}
	if list != nil {
		go c.out.flush() // ends with the connection at the latest
	}
}

// Statuses of streams that have no handler.
var (
	errCut  = status.Error(codes.Unavailable, "the server ends")
	errLate = status.Error(codes.DeadlineExceeded, "the first message of the stream did not arrive within server.read_header_timeout")
)

// look checks what no frame of the client shows: silence, writes without progress, and streams whose
// first message is late. It does not wait. The goroutine of Server.tick calls it once in a period.
func (c *conn) look(now time.Time) {
	c.mu.Lock()
	begun, warned := c.begun, c.leaving == warned
	c.mu.Unlock()
	if !begun {
		return // the handshake has its own limit
	}
	if c.silent += period; c.heard.Swap(false) {
		c.silent = 0
	}
	if c.stalled() || c.silent >= pingAfter+pingTimeout {
		go c.nc.Close() // the end of TLS may wait for a client that does not read
		return
	}
	if c.silent == pingAfter {
		c.out.control(func(f *http2.Framer) { _ = f.WritePing(false, [8]byte{}) })
	}
	if warned {
		if c.parted += period; c.parted >= goAwayTimeout {
			c.refuseMore()
		}
	}
	c.endUnused(errLate, func(s *Stream) bool { return now.Sub(s.opened) >= c.server.options.FirstMessage })
}

// stalled reports whether a write has made no progress for writeTimeout.
func (c *conn) stalled() bool {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	if c.stuck += period; !c.out.writing || c.out.writes != c.wrote {
		c.stuck = 0
	}
	c.wrote = c.out.writes
	return c.stuck >= writeTimeout
}
