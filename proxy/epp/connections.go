package epp

import (
	"context"
	"net"
	"sync"
	"syscall"

	service "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"github.com/pdproxy/pdproxy/proxy/connlimit"
	"github.com/pdproxy/pdproxy/proxy/socket"
)

// listener limits the connections.
// grpc-go sets the limit of unacknowledged bytes only on its own kind of connection, so the
// listener sets the limit.
type listener struct {
	net.Listener
	limit    *connlimit.Limit
	arrivals *arrivals
}

// Accept implements net.Listener.
func (l listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		place := l.limit.Enter(c)
		if place == nil {
			c.Close()
			continue
		}
		if s, ok := c.(syscall.Conn); ok {
			if raw, err := s.SyscallConn(); err == nil {
				_ = socket.GiveUpAfter(raw, pingTimeout) // an error means that the gateway has left
			}
		}
		g := &conn{Conn: c, place: place, arrivals: l.arrivals}
		g.remote = remote{g.Conn.RemoteAddr(), g}
		l.arrivals.enter(g)
		return g, nil
	}
}

// conn is a connection of a gateway. It has a place while it is open, and is idle while no
// stream has a request.
type conn struct {
	net.Conn
	place  *connlimit.Place
	remote remote
	unused int // streams without a request; guarded by unused.mu

	arrivals *arrivals
	last     uint32 // the stream of the last frame; of the goroutine that reads

	mu      sync.Mutex
	streams map[uint32]*arriving // open streams by their ids; guarded by mu
	held    int64                // memory of the messages of streams, in bytes; guarded by mu
	ending  int64                // bytes of held of streams that were told to end; guarded by mu
	over    bool                 // the connection is closed; guarded by mu
}

// remote is the address of a gateway. grpc-go passes the address of the connection to each
// stream, so remote names the connection too.
type remote struct {
	net.Addr
	conn *conn
}

// RemoteAddr implements net.Conn.
func (c *conn) RemoteAddr() net.Addr { return c.remote }

// Close implements net.Conn.
func (c *conn) Close() error {
	defer c.place.Leave()
	err := c.Conn.Close()
	c.arrivals.leave(c)
	return err
}

// begin records that a stream has a request.
func (c *conn) begin() {
	if c != nil {
		c.place.Begin()
	}
}

// end records the end of the request of a stream.
func (c *conn) end() {
	if c != nil {
		c.place.End()
	}
}

// connOf returns the connection of a stream. It returns nil for a stream that did not come
// through listener; such a stream has no limits.
func connOf(ctx context.Context) *conn {
	if p, ok := peer.FromContext(ctx); ok {
		if r, ok := p.Addr.(remote); ok {
			return r.conn
		}
	}
	return nil
}

// maxUnused bounds the streams without a request. One such stream takes about 14 KiB.
const maxUnused = 4096

// unused counts the streams without a request: streams whose first message has not arrived,
// and streams of other services. Above maxUnused in total, a connection may have only its
// share of maxUnused. So one gateway cannot exclude another one, and the total stays below
// twice maxUnused. Safe for concurrent use. The zero value counts no streams.
type unused struct {
	mu    sync.Mutex
	all   int // guarded by mu
	conns int // connections with unused streams; guarded by mu
}

// enter counts a stream of c. It returns false if there is no room for the stream.
func (u *unused) enter(c *conn) bool {
	if c == nil {
		return true
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.all >= maxUnused && c.unused > 0 && c.unused >= maxUnused/u.conns {
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
	if c == nil {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.all--
	if c.unused--; c.unused == 0 {
		u.conns--
	}
}

// tap counts the memory of each stream. It also counts the streams of services other than ext_proc,
// which have no handler before their first message, and bounds the time of calls. ctx ends with
// the stream. The goroutine that reads the connection calls tap.
func (s *Server) tap(ctx context.Context, info *tap.Info) (context.Context, error) {
	gateway := connOf(ctx)
	if info.FullMethodName == service.ExternalProcessor_Process_FullMethodName {
		return gateway.enter(ctx), nil
	}
	if !s.unused.enter(gateway) {
		return ctx, errUnused
	}
	ctx = gateway.enter(ctx)
	cancel := func() {}
	if info.FullMethodName != grpc_health_v1.Health_Watch_FullMethodName {
		ctx, cancel = context.WithTimeout(ctx, s.options.HeadTimeout)
	}
	context.AfterFunc(ctx, func() {
		cancel()
		s.unused.leave(gateway)
	})
	return ctx, nil
}

// Errors of streams that send no request.
var (
	errUnused = status.Error(codes.ResourceExhausted, "too many streams wait for their first message")
	errLate   = status.Error(codes.DeadlineExceeded, "the first message of the stream did not arrive within server.read_header_timeout")
)
