package edge

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"

	"github.com/pdproxy/pdproxy/proxy/downstream"
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
