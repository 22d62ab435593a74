package proxy

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

// quicBuffer is the socket buffer that quic-go asks for (sys_conn_buffers.go).
const quicBuffer = 7 << 20

// quicFront is the HTTP/3 listener. A nil *quicFront does nothing.
type quicFront struct {
	conn      *net.UDPConn
	port      int
	transport *quic.Transport
	listener  *quic.Listener
	conns     *http3Conns
	lane      *quicLane // nil: the port is this process's alone
}

// Limits of one connection of HTTP/2 and of HTTP/3.
const (
	// streamsPerConn is how many requests run at a time.
	streamsPerConn = 250
	// receiveWindow is how many bytes of bodies a client may send that nobody has
	// read yet.
	receiveWindow = 1 << 20
	// firstStreamWindow and firstConnWindow are what an HTTP/3 client may send before
	// anything has been read, on a stream and in all.
	firstStreamWindow, firstConnWindow = 128 << 10, 256 << 10
	// controlStreams is how many streams without a request an HTTP/3 client may
	// have; it needs three, and some clients send further ones to be ignored.
	controlStreams = 8
)

// listenQUIC opens the UDP socket, which processes of the directory lanes share
// unless that is nil. 0-RTT stays off: a replayed POST would generate twice.
func listenQUIC(cfg *config.Config, certs *Certs, h http.Handler, base context.Context, lanes *privatedir.Dir, places *connections, log *slog.Logger) (*quicFront, error) {
	q := new(quicFront)
	if err := q.open(lanes, cfg.Server.HTTP3, &h); err != nil {
		return nil, err
	}
	headLimit := time.Duration(cfg.Server.ReadHeaderTimeout)
	q.conns = newHTTP3Conns(&http3.Server{
		Handler:        h,
		MaxHeaderBytes: int(cfg.Server.MaxHeader),
		IdleTimeout:    time.Duration(cfg.Server.IdleTimeout),
		ConnContext:    func(ctx context.Context, _ *quic.Conn) context.Context { return withBase(ctx, base) },
		Logger:         slog.New(slog.DiscardHandler),
	}, headLimit)
	q.conns.admit(q.transport, places)
	var err error
	q.listener, err = q.transport.Listen(http3.ConfigureTLSConfig(certs.config(http3.NextProtoH3)), &quic.Config{
		HandshakeIdleTimeout:  headLimit / 2, // a handshake may take twice that in all
		MaxIncomingStreams:    streamsPerConn,
		MaxIncomingUniStreams: controlStreams,
		// Many frames of one byte behind a gap take far more memory than their bytes.
		// The windows grow as bytes are read.
		InitialStreamReceiveWindow:     firstStreamWindow,
		InitialConnectionReceiveWindow: firstConnWindow,
		MaxStreamReceiveWindow:         receiveWindow,
		MaxConnectionReceiveWindow:     receiveWindow,
		KeepAlivePeriod:                15 * time.Second,
	})
	if err != nil {
		q.close()
		return nil, err
	}
	checkBuffers(q.conn, log)
	return q, nil
}

// open opens the UDP socket. A lane counts the requests of h.
func (q *quicFront) open(lanes *privatedir.Dir, address string, h *http.Handler) error {
	if lanes == nil {
		addr, err := net.ResolveUDPAddr("udp", address)
		if err != nil {
			return err
		}
		if q.conn, err = net.ListenUDP("udp", addr); err != nil {
			return err
		}
		q.transport = &quic.Transport{Conn: q.conn}
	} else {
		var err error
		if q.lane, err = openLane(lanes, address); err != nil {
			return err
		}
		*h = q.lane.count(*h)
		q.conn, q.transport = q.lane.conn.UDPConn, q.lane.transport
	}
	q.port = q.conn.LocalAddr().(*net.UDPAddr).Port
	return nil
}

// withBase returns conn's context that also ends when base does, with its cause.
func withBase(conn, base context.Context) context.Context {
	ctx, cancel := context.WithCancelCause(conn)
	stop := context.AfterFunc(base, func() { cancel(context.Cause(base)) })
	context.AfterFunc(conn, func() {
		stop()
		cancel(context.Cause(conn))
	})
	return ctx
}

// checkBuffers says in the proxy's own log what quic-go would print on
// standard error when the kernel grants less than it asks for.
func checkBuffers(conn *net.UDPConn, log *slog.Logger) {
	_ = os.Setenv("QUIC_GO_DISABLE_RECEIVE_BUFFER_WARNING", "true")
	_ = conn.SetReadBuffer(quicBuffer) // what was granted is read below
	_ = conn.SetWriteBuffer(quicBuffer)
	raw, err := conn.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		rcv, err1 := syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF)
		snd, err2 := syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_SNDBUF)
		if err1 != nil || err2 != nil || rcv >= quicBuffer && snd >= quicBuffer {
			return // the kernel reports twice what was set
		}
		log.Warn("UDP buffers are small for HTTP/3; set: sysctl -w net.core.rmem_max=7500000; sysctl -w net.core.wmem_max=7500000",
			"receive_bytes", rcv, "send_bytes", snd, "wanted_bytes", quicBuffer)
	})
}

// advertise adds Alt-Svc to the answers of the TCP listener.
func (q *quicFront) advertise(h http.Handler) http.Handler {
	value := fmt.Sprintf(`h3=":%d"; ma=86400`, q.port)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header()["Alt-Svc"] = []string{value}
		h.ServeHTTP(w, r)
	})
}

func (q *quicFront) serve() error {
	if q.lane != nil {
		defer close(q.lane.taken)
		if err := q.lane.conn.Serve(); err != nil {
			return err
		}
	}
	return q.conns.serve(q.listener)
}

func (q *quicFront) shutdown(ctx context.Context) error {
	switch {
	case q == nil:
		return nil
	case q.lane != nil:
		return q.lane.shutdown(ctx, q)
	}
	_ = q.listener.Close() // never fails
	return q.conns.shutdown(ctx)
}

func (q *quicFront) close() {
	if q == nil {
		return
	}
	if q.listener != nil {
		_ = q.listener.Close() // never fails
	}
	q.conns.close()
	_ = q.transport.Close() // the socket stays open
	if q.lane != nil {
		q.lane.close()
		return
	}
	q.conn.Close()
}
