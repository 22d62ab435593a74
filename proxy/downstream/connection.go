// Package downstream serves one client: it holds the bytes of the request, and it is the
// only way to write to the client.
package downstream

import (
	"context"
	"net"
)

type connectionKey struct{}

// WithConnection returns a context for the requests of c, an HTTP/1.1 connection whose
// bytes may be written below net/http.
func WithConnection(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connectionKey{}, c)
}

// Connection returns the connection that WithConnection has put into ctx, nil if there
// is none.
func Connection(ctx context.Context) net.Conn {
	c, _ := ctx.Value(connectionKey{}).(net.Conn)
	return c
}
