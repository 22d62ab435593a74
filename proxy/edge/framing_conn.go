package edge

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// framingListener is for the connections of net/http: those of HTTP/2, and of HTTP/1.1 with
// server.http1 = "nethttp". It refuses requests with ambiguous framing, above all Content-Length
// together with Transfer-Encoding. Attackers use such requests to smuggle one request
// inside another. net/http accepts them and hides the length from the handler, so the
// check stands below net/http and follows the bytes of the connection. In place of the
// rest of a bad or too large head it gives net/http a malformed line; net/http refuses the
// line and closes the connection. A connection whose framing cannot be followed ends, too: no
// byte reaches net/http unchecked. Each refusal that net/http writes by itself becomes an
// answer with JSON.
type framingListener struct {
	net.Listener
	conns     *clientConns
	headLimit int // of HTTP/1.1, in bytes; headSlack comes on top
}

// Accept implements net.Listener.
func (l framingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	fc := &framingConn{Conn: c, tcp: tcpOf(c), conns: l.conns, f: framing{limit: l.headLimit}}
	l.conns.add(fc)
	return fc, nil
}

type framingConn struct {
	net.Conn
	tcp      *tcpConn // below Conn
	conns    *clientConns
	f        framing              // only Read uses it, and net/http has one reader at a time
	tlsState *tls.ConnectionState // nil without TLS
	handled  atomic.Bool          // a handler of HTTP/1.1 has the present request; before, net/http writes only refusals
	refused  bool                 // a refusal has been sent; only the goroutine of net/http uses it
	http2    atomic.Bool          // the preface of HTTP/2 has been read
	heads    headWatch            // of HTTP/2; only Read uses it
	away     goAway               // of HTTP/2
}

// Write implements net.Conn.
func (c *framingConn) Write(p []byte) (int, error) {
	if c.http2.Load() {
		return c.away.write(c.Conn, p)
	}
	switch {
	case c.handled.Load():
	case c.refused:
		return len(p), nil
	default:
		e := ownRefusal(p)
		if e == nil {
			break
		}
		if c.f.refusal != nil { // framing made net/http refuse the head
			e = c.f.refusal
		}
		if err := c.refuse(e); err != nil {
			return 0, err
		}
		return len(p), nil
	}
	return c.Conn.Write(p)
}

// Close implements net.Conn.
func (c *framingConn) Close() error {
	c.conns.remove(c)
	return c.Conn.Close()
}

// Read implements net.Conn.
func (c *framingConn) Read(p []byte) (int, error) {
	if c.f.state == framingEnd {
		return c.f.readRefusal(p)
	}
	n, err := c.Conn.Read(p)
	if c.f.state == framingRaw {
		return n, err
	}
	if c.f.state == framingOff {
		c.watchHead(p[:n])
		return n, err
	}
	begun := c.f.preface
	pass := c.f.follow(p[:n])
	if c.f.state == framingOff {
		c.http2.Store(true)
		c.watchHead(p[len(http2Preface)-begun : n])
	}
	switch {
	case pass == 0 && n > 0:
		return c.f.readRefusal(p)
	case pass < n:
		err = nil // the next Read returns the malformed line
	}
	return pass, err
}

// watchHead records the begins and ends of request heads among the frames in p.
func (c *framingConn) watchHead(p []byte) {
	was, parts := c.heads.inside(), c.heads.parts
	c.heads.follow(p)
	switch inside := c.heads.inside(); {
	case !inside && was:
		c.tcp.head.Store(0)
	case inside && (!was || c.heads.parts != parts):
		c.tcp.head.Store(c.tcp.all.tick.Load())
	}
}

// CloseWrite lets net/http send FIN before it closes a connection with unread input, so
// that the client can read the answer.
func (c *framingConn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return nil
}

// connKey is the key of the *framingConn in the context of its requests.
type connKey struct{}

// connContext is the http.Server.ConnContext of all servers.
func connContext(ctx context.Context, c net.Conn) context.Context {
	fc, ok := c.(*framingConn)
	if !ok {
		return ctx
	}
	if tc, ok := fc.Conn.(*tls.Conn); ok {
		state := tc.ConnectionState()
		fc.tlsState = &state
	}
	return context.WithValue(ctx, connKey{}, fc)
}

// connState is the http.Server.ConnState of all servers.
func connState(c net.Conn, state http.ConnState) {
	fc := c.(*framingConn) // each listener makes such connections
	switch state {
	case http.StateActive:
		fc.tcp.busy()
	case http.StateIdle:
		fc.handled.Store(false)
		fc.tcp.rest()
	case http.StateHijacked: // a handler serves another protocol, so every byte passes; no Read runs
		if fc.f.state != framingEnd { // after a refusal no byte passes
			fc.f.state = framingRaw
		}
	}
}

// tcpHandler prepares the requests over TCP. It is one handler for all preparations, because each
// handler around next adds a frame to the stack of each open stream.
type tcpHandler struct {
	s    *Server
	next http.Handler
}

// ServeHTTP sets http.Request.TLS. net/http cannot do so, because the TLS listener has done the
// handshake. It adds Connection: close to the answers over HTTP/1.1 after StopAccepting. Over
// HTTP/2 that header would send the GOAWAY of net/http. It refuses requests of broken connections
// and, over HTTP/2, too large heads.
func (h tcpHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	fc := r.Context().Value(connKey{}).(*framingConn) // each listener makes such connections
	if fc.tlsState != nil {
		r.TLS = fc.tlsState
	}
	if r.ProtoMajor >= 2 {
		if limitHeads(w, r, int(h.s.cfg.Server.MaxHeader)) {
			return
		}
	} else {
		fc.handled.Store(true)
		if h.s.stopping.Load() {
			w.Header().Set("Connection", "close")
		}
		if r.Context().Err() != nil {
			refuseBroken(w)
			return
		}
	}
	h.next.ServeHTTP(w, r)
}

// refuseBroken answers a request of a broken HTTP/1.1 connection. If a deadline ends the read of
// a body after the head of the answer was sent, net/http cancels the contexts of all later
// requests of the connection. Without this answer, such a request would end without one.
func refuseBroken(w http.ResponseWriter) {
	w.Header().Set("Connection", "close")
	downstream.Error(w, openai.NewError(openai.CodeConnectionBroken, "an earlier request has broken this connection; send the request on a new connection"))
}
