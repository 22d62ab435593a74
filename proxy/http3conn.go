package proxy

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

// newRawServerConn makes the HTTP/3 side of a connection and returns its control
// stream, too. The public http3.Server.NewRawServerConn is the same function, but
// drops that stream, and so the only way to send GOAWAY; http3.Server itself sends
// GOAWAY, but sets no deadline for the head of a request.
//
//go:linkname newRawServerConn github.com/quic-go/quic-go/http3.(*Server).newRawServerConn
func newRawServerConn(s *http3.Server, c *quic.Conn) (*http3.RawServerConn, *quic.SendStream, error)

// http3Conns serves the connections of one QUIC listener: as http3.Server does, but
// with a limit for the time that the head of a request may take.
type http3Conns struct {
	server    *http3.Server // makes the HTTP/3 side of connections
	headLimit time.Duration

	grace  context.Context // ends with shutdown: streams are refused from then on
	retire context.CancelFunc
	open   context.Context // ends with close: connections are closed
	end    context.CancelFunc
	conns  inflight.Group
	young  atomic.Int64 // connections whose handshake runs, or that are not yet accepted
}

func newHTTP3Conns(server *http3.Server, headLimit time.Duration) *http3Conns {
	h := &http3Conns{server: server, headLimit: headLimit}
	h.open, h.end = context.WithCancel(context.Background())
	h.grace, h.retire = context.WithCancel(h.open)
	server.Handler = headRead(server.Handler)
	return h
}

// headRead lifts the deadline of the head, which has been read.
func headRead(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // never fails
		h.ServeHTTP(w, r)
	})
}

// serve accepts connections until the listener closes or shutdown; then the error is
// nil.
func (h *http3Conns) serve(l *quic.Listener) error {
	for {
		c, err := l.Accept(h.grace)
		switch {
		case errors.Is(err, quic.ErrServerClosed) || h.grace.Err() != nil && err != nil:
			return nil
		case err != nil:
			return err
		}
		grown(c.Context())
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

// refuseStreams refuses new requests as never begun (RFC 9114 4.1.1) until the
// connection is closed, or is to be.
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

// goAway3 is the frame that asks an HTTP/3 client to send no more requests here; the
// one of stream next, and later ones, have not been served (RFC 9114 5.2).
func goAway3(next quic.StreamID) []byte {
	const frameType = 0x7
	b := quicvarint.Append(nil, frameType)
	b = quicvarint.Append(b, uint64(quicvarint.Len(uint64(next))))
	return quicvarint.Append(b, uint64(next))
}

// shutdown sends GOAWAY on all connections and waits until they are closed. It
// closes them when ctx ends, and returns its error.
func (h *http3Conns) shutdown(ctx context.Context) error {
	h.retire()
	stop := context.AfterFunc(ctx, h.end)
	defer stop()
	h.conns.Wait()
	return ctx.Err()
}

// close closes all connections and waits for their requests.
func (h *http3Conns) close() {
	h.end()
	h.conns.Wait()
}

// youngKey finds, in the context of a connection, what counts it as accepted;
// placeKey its place.
type (
	youngKey struct{}
	placeKey struct{}
)

// grown counts the connection as accepted.
func grown(conn context.Context) {
	if accepted, ok := conn.Value(youngKey{}).(func()); ok {
		accepted()
	}
}

func placeOf(conn context.Context) *connection {
	k, _ := conn.Value(placeKey{}).(*connection)
	return k
}

var errNoPlace = errors.New("too many connections")

// admit makes a transport count its connections and bounds them: it refuses one that
// has no place, and makes clients prove their address by a Retry while many
// handshakes run. Until then a handshake may bear the address of somebody else; such
// handshakes take at most half of the places of one address.
func (h *http3Conns) admit(t *quic.Transport, places *connections) {
	t.VerifySourceAddress = func(addr net.Addr) bool { return int(h.young.Load()) >= places.unproven() }
	t.ConnContext = func(ctx context.Context, client *quic.ClientInfo) (context.Context, error) {
		place := places.take(client.RemoteAddr, carriedByQUIC)
		if place == nil {
			return nil, errNoPlace // CONNECTION_REFUSED
		}
		h.young.Add(1)
		accepted := sync.OnceFunc(func() { h.young.Add(-1) })
		context.AfterFunc(ctx, func() {
			accepted()
			place.leave()
		})
		ctx = context.WithValue(ctx, youngKey{}, accepted)
		return context.WithValue(ctx, placeKey{}, place), nil
	}
}
