package connlimit

import (
	"context"
	"net"
	"net/http"
	"sync"
)

// placeKey is the key of a connection's Place in the contexts of its requests.
type placeKey struct{}

// HTTP limits the connections of an HTTP/1.1 server, whose Handler is set. A connection is
// idle while no handler runs, also while the head of a request arrives. The hooks that the
// server has already are still called.
func HTTP(server *http.Server) { New().http(server) }

func (l *Limit) http(server *http.Server) {
	connContext, connState, handler := server.ConnContext, server.ConnState, server.Handler
	var places sync.Map // net.Conn to *Place
	server.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		if connContext != nil {
			ctx = connContext(ctx, c)
		}
		p := l.Enter(c)
		if p == nil {
			c.Close() // the server sees the close at its first read
			return ctx
		}
		places.Store(c, p)
		return context.WithValue(ctx, placeKey{}, p)
	}
	server.ConnState = func(c net.Conn, state http.ConnState) {
		if state == http.StateClosed || state == http.StateHijacked {
			if p, entered := places.LoadAndDelete(c); entered {
				p.(*Place).Leave()
			}
		}
		if connState != nil {
			connState(c, state)
		}
	}
	server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p, entered := r.Context().Value(placeKey{}).(*Place); entered {
			p.Begin()
			defer p.End()
		}
		handler.ServeHTTP(w, r)
	})
}
