package edge

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
	_ "unsafe" // for go:linkname

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/quicvarint"

	"github.com/pdproxy/pdproxy/proxy/inflight"
)

// newRawServerConn makes the HTTP/3 side of a connection and also returns its control
// stream, which is the only way to send GOAWAY. The public http3.Server.NewRawServerConn
// is the same function but drops that stream. http3.Server itself sends GOAWAY but sets
// no deadline for the head of a request.
//
//go:linkname newRawServerConn github.com/quic-go/quic-go/http3.(*Server).newRawServerConn
func newRawServerConn(s *http3.Server, c *quic.Conn) (*http3.RawServerConn, *quic.SendStream, error)

// http3Conns serves the connections of one QUIC listener as http3.Server does, but with a
// limit for the time of a request head.
type http3Conns struct {
	server    *http3.Server // makes the HTTP/3 side of connections
	headLimit time.Duration

	grace  context.Context // ends at shutdown; later streams are refused
	goAway context.CancelFunc
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
	h.grace, h.goAway = context.WithCancel(h.open)
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

// serveConn serves a connection until it is closed and no request runs.
func (h *http3Conns) serveConn(c *quic.Conn) {
	hc, control, err := newRawServerConn(h.server, c)
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
	next := quic.StreamID(0)
	for {
		s, err := c.AcceptStream(h.grace)
		if err != nil {
			break
		}
		next = s.StreamID() + 4
		_ = s.SetReadDeadline(time.Now().Add(h.headLimit)) // never fails
		place.begin()
		wg.Go(func() {
			defer place.done()
			hc.HandleRequestStream(s)
		})
	}
	if c.Context().Err() != nil {
		return
	}
	wg.Go(func() { _, _ = control.Write(goAway3(next)) }) // returns when the connection is closed
	h.refuseStreams(c)
	_ = hc.CloseWithError(quic.ApplicationErrorCode(http3.ErrCodeNoError), "")
}

// refuseStreams refuses new requests as not processed (RFC 9114 4.1.1) until the
// connection is closed or close is called.
func (h *http3Conns) refuseStreams(c *quic.Conn) {
	for {
		s, err := c.AcceptStream(h.open)
		if err != nil {
			return
		}
		s.ReleaseStreamCredit()
		s.CancelRead(quic.StreamErrorCode(http3.ErrCodeRequestRejected))
		s.CancelWrite(quic.StreamErrorCode(http3.ErrCodeRequestRejected))
	}
}

// goAway3 returns the frame that instructs an HTTP/3 client to send no more requests on this
// connection. The requests of stream next and of later streams are not served (RFC 9114 5.2).
func goAway3(next quic.StreamID) []byte {
	const frameType = 0x7
	b := quicvarint.Append(nil, frameType)
	b = quicvarint.Append(b, uint64(quicvarint.Len(uint64(next))))
	return quicvarint.Append(b, uint64(next))
}

// shutdown sends GOAWAY on all connections and waits until they are closed. When ctx ends
// it closes them and returns the error of ctx.
func (h *http3Conns) shutdown(ctx context.Context) error {
	h.goAway()
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
