package grpcserver

import (
	"net"
	"testing"
	"testing/synctest"

	"golang.org/x/net/http2"
)

// busyConn is a connection for which another goroutine adds frames during each write.
type busyConn struct {
	net.Conn
	left    int // writes during which frames are added
	written chan struct{}
	add     func()
}

// Write implements net.Conn.
func (c *busyConn) Write(p []byte) (int, error) {
	if c.left--; c.left >= 0 {
		c.add()
	}
	c.written <- struct{}{}
	return len(p), nil
}

// TestOwnWrites: a sender that also writes the frames of others goes on after some writes, and nothing
// stays unwritten.
func TestOwnWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := output{done: make(chan struct{})}
		o.framer = http2.NewFramer(&o, nil)
		ping := func() {
			o.mu.Lock()
			defer o.mu.Unlock()
			_ = o.framer.WritePing(false, [8]byte{})
		}
		const others = 10 * ownWrites
		c := &busyConn{left: others, written: make(chan struct{}, ownWrites), add: ping} // blocks the next write
		o.nc = c
		ping()
		o.flush()
		for range others + 1 {
			<-c.written
		}
		synctest.Wait()
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.writes != others+1 || o.writing || len(o.pending) > 0 {
			t.Errorf("%d writes, writing %v, %d bytes are left", o.writes, o.writing, len(o.pending))
		}
	})
}
