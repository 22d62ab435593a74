package edge

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"github.com/pdproxy/pdproxy/proxy/inflight"
)

// http3Conns serves the connections of one QUIC listener. http3.Server has no limit for the time
// of a request head, so http3Conns accepts the streams itself. It sends no GOAWAY, because quic-go
// exports no way to send it on a connection whose streams another loop accepts. Instead a takeover
// closes connections without a request, and a drain refuses new requests as not processed.
type http3Conns struct {
	server    *http3.Server // makes the HTTP/3 side of connections
	headLimit time.Duration

	stay   context.Context // ends at leave and at shutdown; connections without a request are closed then
	settle context.CancelFunc
	grace  context.Context // ends at shutdown; later streams are refused
	drain  context.CancelFunc
	open   context.Context // ends at close; connections are closed then
	end    context.CancelFunc
	conns  inflight.Group
	// handshaking counts the connections that serve has not accepted yet: their
	// handshakes run or have just ended.
	handshaking atomic.Int64
}

func newHTTP3Conns(server *http3.Server, headLimit time.Duration) *http3Conns {
	h := &http3Conns{server: server, headLimit: headLimit}
	h.open, h.end = context.WithCancel(context.Background())
	h.grace, h.drain = context.WithCancel(h.open)
	h.stay, h.settle = context.WithCancel(h.grace)
	return h
}

// endHead removes the read deadline of the head, because the head has been read, and refuses a
// head of more than size bytes.
func endHead(h http.Handler, size int) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // never fails
		if !limitHeads(w, r, size) {
			h.ServeHTTP(w, r)
		}
	})
}

// serve accepts connections until the listener closes or shutdown begins, and returns nil
// then.
func (h *http3Conns) serve(l *quic.Listener) error {
	for {
		c, err := l.Accept(h.grace)
		switch {
		case errors.Is(err, quic.ErrServerClosed) || h.grace.Err() != nil && err != nil:
			return nil
		case err != nil:
			return err
		}
		accepted(c.Context())
		h.conns.Go(func() { h.serveConn(c) })
	}
}

// serveConn serves a connection until it is closed and no request runs. After leave or shutdown,
// serveConn closes the connection when no request has run on it for settleTime. After shutdown it
// refuses new requests as not processed (RFC 9114 4.1.1), so that clients send them on a new
// connection, to another process. The close has the same code, for requests that are under way.
func (h *http3Conns) serveConn(c *quic.Conn) {
	hc, err := h.server.NewRawServerConn(c)
	if err != nil {
		_ = c.CloseWithError(quic.ApplicationErrorCode(http3.ErrCodeInternalError), "")
		return
	}
	place := placeOf(c.Context())
	place.ready(func() { _ = hc.CloseWithError(quic.ApplicationErrorCode(http3.ErrCodeNoError), "too many connections") })
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for {
			s, err := c.AcceptUniStream(context.Background()) // until the connection is closed
			if err != nil {
				return
			}
			wg.Go(func() { hc.HandleUnidirectionalStream(s) })
		}
	})
	ctx, cancel := h.stay, context.CancelFunc(func() {})
	for {
		s, err := c.AcceptStream(ctx)
		if err != nil {
			wait := time.Until(place.settled())
			if ctx.Err() == nil || h.open.Err() != nil || wait <= 0 { // ctx.Err() == nil: the connection is closed
				break
			}
			cancel()
			ctx, cancel = context.WithTimeout(h.open, wait)
			continue
		}
		if h.grace.Err() != nil {
			s.ReleaseStreamCredit()
			s.CancelRead(quic.StreamErrorCode(http3.ErrCodeRequestRejected))
			s.CancelWrite(quic.StreamErrorCode(http3.ErrCodeRequestRejected))
			continue
		}
		_ = s.SetReadDeadline(time.Now().Add(h.headLimit)) // never fails
		place.begin()
		wg.Go(func() {
			defer place.done()
			hc.HandleRequestStream(s)
		})
	}
	cancel()
	_ = hc.CloseWithError(quic.ApplicationErrorCode(http3.ErrCodeRequestRejected), "draining")
}

// leave ends each connection when no request has run on it for settleTime, and waits until all are
// closed. Until shutdown the connections serve new requests.
func (h *http3Conns) leave() {
	h.settle()
	h.conns.Wait()
}

// shutdown refuses new requests, ends each connection settleTime after its last request, and waits
// until all are closed. When ctx ends it closes them and returns the error of ctx.
func (h *http3Conns) shutdown(ctx context.Context) error {
	h.drain()
	stop := context.AfterFunc(ctx, h.end)
	defer stop()
	h.conns.Wait()
	return ctx.Err()
}

// close closes all connections and waits for their handlers.
func (h *http3Conns) close() {
	h.end()
	h.conns.Wait()
}

// Keys of the context of a connection: a func() that counts the connection as accepted,
// and its *connection.
type (
	acceptedKey struct{}
	placeKey    struct{}
)

// accepted counts the connection as accepted.
func accepted(conn context.Context) {
	if done, ok := conn.Value(acceptedKey{}).(func()); ok {
		done()
	}
}

func placeOf(conn context.Context) *connection {
	k, _ := conn.Value(placeKey{}).(*connection)
	return k
}

var errNoPlace = errors.New("too many connections")

// limit makes a transport count its connections. The transport refuses a connection for
// which there is no place. While many handshakes run, clients must prove their address by
// a Retry, because an attacker can send a handshake from a foreign address. Unproven
// handshakes take at most half of the places of one address.
func (h *http3Conns) limit(t *quic.Transport, places *connections) {
	t.VerifySourceAddress = func(addr net.Addr) bool { return int(h.handshaking.Load()) >= places.unproven() }
	t.ConnContext = func(ctx context.Context, client *quic.ClientInfo) (context.Context, error) {
		place := places.take(client.RemoteAddr, carriedByQUIC)
		if place == nil {
			return nil, errNoPlace // CONNECTION_REFUSED
		}
		h.handshaking.Add(1)
		done := sync.OnceFunc(func() { h.handshaking.Add(-1) })
		context.AfterFunc(ctx, func() {
			done()
			place.leave()
		})
		ctx = context.WithValue(ctx, acceptedKey{}, done)
		return context.WithValue(ctx, placeKey{}, place), nil
	}
}
