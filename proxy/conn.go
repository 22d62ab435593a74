package proxy

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"

	"github.com/pdproxy/pdproxy/proxy/downstream"
)

// tlsKey is the key of a context under which the TLS state of its connection is.
type tlsKey struct{}

// withConn adds to the context of an HTTP/1.1 connection the connection without its
// framing checks, and the state of TLS on it.
func withConn(ctx context.Context, c net.Conn) context.Context {
	fc, ok := c.(*framingConn)
	if !ok {
		return ctx
	}
	if tc, ok := fc.Conn.(*tls.Conn); ok {
		state := tc.ConnectionState()
		ctx = context.WithValue(ctx, tlsKey{}, &state)
	}
	return downstream.WithConn(ctx, fc.Conn)
}

// withTLS sets the TLS state of requests. net/http does not know it, because demux has
// done the handshake.
func withTLS(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if state, ok := r.Context().Value(tlsKey{}).(*tls.ConnectionState); ok {
			r.TLS = state
		}
		h.ServeHTTP(w, r)
	})
}
