package grpcserver

import (
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// MaxUnused bounds the streams without a request. One such stream takes less than 1 KiB, without its
// message.
const MaxUnused = 4096

// errUnused is the status of a stream that has no room.
var errUnused = status.Error(codes.ResourceExhausted, "too many streams wait for their first message")

// unused counts the streams without a request: streams whose first message has not arrived,
// and streams whose method has no requests. Above MaxUnused in total, a connection may have only its
// share of MaxUnused. So one client cannot exclude another one, and the total stays below
// twice MaxUnused. Safe for concurrent use. The zero value counts no streams.
type unused struct {
	mu    sync.Mutex
	all   int // guarded by mu
	conns int // connections with unused streams; guarded by mu
}

// enter counts a stream of c. It returns false if there is no room for the stream.
func (u *unused) enter(c *conn) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.all >= MaxUnused && c.unused > 0 && c.unused >= MaxUnused/u.conns {
		return false
	}
	if c.unused == 0 {
		u.conns++
	}
	c.unused++
	u.all++
	return true
}

// leave ends the counting of a stream of c.
func (u *unused) leave(c *conn) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.all--
	if c.unused--; c.unused == 0 {
		u.conns--
	}
}
