package edge

import (
	"context"
	"errors"
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

// quicBuffer is the size of the socket buffers that quic-go requests (sys_conn_buffers.go), in
// bytes.
const quicBuffer = 7 << 20

// quicListener is the HTTP/3 listener. A nil *quicListener does nothing.
type quicListener struct {
	conn      *net.UDPConn
	port      int
	transport *quic.Transport
	listener  *quic.Listener
	conns     *http3Conns
	shared    *sharedPort // nil: this process has the port alone
	headSize  int         // limit of a head, in bytes
}

// Limits of one connection of HTTP/2 and of HTTP/3.
const (
	// streamsPerConn is the number of concurrent requests.
	streamsPerConn = 250
	// receiveWindow is the number of unread bytes of bodies that a client may send.
	receiveWindow = 1 << 20
	// firstStreamWindow and firstConnWindow are the bytes that an HTTP/3 client may send
	// before the first read, on one stream and on all.
	firstStreamWindow, firstConnWindow = 128 << 10, 256 << 10
	// controlStreams is the number of streams without a request that an HTTP/3 client
	// may open. It needs three, and some clients open more, which servers ignore.
	controlStreams = 8
)

// listenQUIC opens the UDP socket. It shares the port with the processes of o.QUICDir
// unless that is nil. 0-RTT stays off, because a replayed POST would generate twice.
func listenQUIC(cfg *config.Config, o Options, base context.Context, places *connections) (*quicListener, error) {
	q := &quicListener{headSize: int(cfg.Server.MaxHeader)}
	if err := q.open(o.QUICDir, cfg.Server.HTTP3); err != nil {
		return nil, err
	}
	headLimit := time.Duration(cfg.Server.ReadHeaderTimeout)
	q.conns = newHTTP3Conns(&http3.Server{
		MaxHeaderBytes: libraryHeads * int(cfg.Server.MaxHeader),
		IdleTimeout:    time.Duration(cfg.Server.IdleTimeout),
		ConnContext:    func(ctx context.Context, _ *quic.Conn) context.Context { return withBase(ctx, base) },
		Logger:         slog.New(slog.DiscardHandler),
	}, headLimit)
	q.conns.limit(q.transport, places)
	var err error
	q.listener, err = q.transport.Listen(http3.ConfigureTLSConfig(o.Certs.Config(http3.NextProtoH3)), &quic.Config{
		HandshakeIdleTimeout:  headLimit / 2, // a whole handshake may take twice as long
		MaxIncomingStreams:    streamsPerConn,
		MaxIncomingUniStreams: controlStreams,
		// Many frames of one byte behind a gap take far more memory than their bytes.
		// The windows grow when the handler reads.
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
	checkBuffers(q.conn, o.Log)
	return q, nil
}

// open opens the UDP socket.
func (q *quicListener) open(dir *privatedir.Dir, address string) error {
	if dir == nil {
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
		if q.shared, err = openShared(dir, address); err != nil {
			return err
		}
		q.conn, q.transport = q.shared.conn.UDPConn, q.shared.transport
	}
	q.port = q.conn.LocalAddr().(*net.UDPAddr).Port
	return nil
}

// handle sets the handler of requests. Call it before serve.
func (q *quicListener) handle(h http.Handler) {
	q.conns.server.Handler = endHead(h, q.headSize)
}

// withBase returns a context of conn that also ends when base ends, with its cause.
func withBase(conn, base context.Context) context.Context {
	ctx, cancel := context.WithCancelCause(conn)
	stop := context.AfterFunc(base, func() { cancel(context.Cause(base)) })
	context.AfterFunc(conn, func() {
		stop()
		cancel(context.Cause(conn))
	})
	return ctx
}

// checkBuffers warns in the proxy's log if the kernel grants smaller buffers than quic-go requests.
// quic-go would print that to standard error.
func checkBuffers(conn *net.UDPConn, log *slog.Logger) {
	_ = os.Setenv("QUIC_GO_DISABLE_RECEIVE_BUFFER_WARNING", "true")
	_ = conn.SetReadBuffer(quicBuffer) // the granted size is read below
	_ = conn.SetWriteBuffer(quicBuffer)
	raw, err := conn.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		rcv, err1 := syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF)
		snd, err2 := syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_SNDBUF)
		if err1 != nil || err2 != nil || rcv >= quicBuffer && snd >= quicBuffer {
			return // the kernel reports twice the set size
		}
		log.Warn("UDP buffers are small for HTTP/3; set: sysctl -w net.core.rmem_max=7500000; sysctl -w net.core.wmem_max=7500000",
			"receive_bytes", rcv, "send_bytes", snd, "wanted_bytes", quicBuffer)
	})
}

// advertise adds Alt-Svc to the answers over TCP.
func (q *quicListener) advertise(h http.Handler) http.Handler {
	value := fmt.Sprintf(`h3=":%d"; ma=86400`, q.port)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header()["Alt-Svc"] = []string{value}
		h.ServeHTTP(w, r)
	})
}

func (q *quicListener) serve() error {
	if q.shared != nil {
		defer close(q.shared.accepted)
		if err := q.shared.conn.Serve(); err != nil {
			return err
		}
	}
	return q.conns.serve(q.listener)
}

// leave leaves new clients to a successor, and serves the open connections until all are closed.
// shutdown may be called meanwhile.
func (q *quicListener) leave() {
	if q == nil {
		return
	}
	_ = q.stopAccepting(context.Background()) // an error does not keep connections from being served
	q.conns.leave()
}

func (q *quicListener) shutdown(ctx context.Context) error {
	if q == nil {
		return nil
	}
	err := q.stopAccepting(ctx)
	return errors.Join(err, q.conns.shutdown(ctx))
}

func (q *quicListener) stopAccepting(ctx context.Context) error {
	if q.shared != nil {
		return q.shared.stopAccepting(ctx, q.listener, q.conns)
	}
	return q.listener.Close() // never fails
}

func (q *quicListener) close() {
	if q == nil {
		return
	}
	if q.listener != nil {
		_ = q.listener.Close() // never fails
	}
	q.conns.close()
	_ = q.transport.Close() // the socket stays open
	if q.shared != nil {
		q.shared.close()
		return
	}
	q.conn.Close()
}
