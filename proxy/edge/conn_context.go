package edge

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

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
	return downstream.WithConn(context.WithValue(ctx, connKey{}, fc), fc.Conn)
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
