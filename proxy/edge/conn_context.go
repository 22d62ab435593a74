package edge

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// tlsStateKey is the key of a connection's TLS state in the context of its requests.
type tlsStateKey struct{}

// connContext is the http.Server.ConnContext of all servers.
func connContext(ctx context.Context, c net.Conn) context.Context {
	fc, ok := c.(*framingConn)
	if !ok {
		return ctx
	}
	if tc, ok := fc.Conn.(*tls.Conn); ok {
		state := tc.ConnectionState()
		ctx = context.WithValue(ctx, tlsStateKey{}, &state)
	}
	return downstream.WithConn(ctx, fc.Conn)
}

// withTLSState sets http.Request.TLS. net/http cannot do so, because the TLS listener has
// done the handshake.
func withTLSState(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if state, ok := r.Context().Value(tlsStateKey{}).(*tls.ConnectionState); ok {
			r.TLS = state
		}
		h.ServeHTTP(w, r)
	})
}

// refuseBroken answers the requests of broken HTTP/1.1 connections. If a deadline ends the read
// of a body after the head of the answer was sent, net/http cancels the contexts of all later
// requests of the connection. Without this answer, such a request would end without one.
func refuseBroken(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor == 1 && r.Context().Err() != nil {
			w.Header().Set("Connection", "close")
			downstream.Error(w, openai.NewError(openai.CodeConnectionBroken, "an earlier request has broken this connection; send the request on a new connection"))
			return
		}
		h.ServeHTTP(w, r)
	})
}
