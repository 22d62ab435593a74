package proxy

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

// quicBuffer is the socket buffer that quic-go asks for (sys_conn_buffers.go).
const quicBuffer = 7 << 20

// quicFront is the HTTP/3 listener. A nil *quicFront does nothing.
type quicFront struct {
	conn   *net.UDPConn
	server *http3.Server
	lane   *quicLane // nil: the port is this process's alone
}

// listenQUIC opens the UDP socket, which processes of the directory lanes share
// unless that is nil. 0-RTT stays off: a replayed POST would generate twice.
func listenQUIC(cfg *config.Config, certs *Certs, h http.Handler, base context.Context, lanes *privatedir.Dir, log *slog.Logger) (*quicFront, error) {
	q := &quicFront{server: &http3.Server{
		Handler:        h,
		TLSConfig:      http3.ConfigureTLSConfig(certs.config(http3.NextProtoH3)),
		MaxHeaderBytes: int(cfg.Server.MaxHeader),
		IdleTimeout:    time.Duration(cfg.Server.IdleTimeout),
		QUICConfig:     &quic.Config{Allow0RTT: false, MaxIncomingStreams: 10000, KeepAlivePeriod: 15 * time.Second},
		ConnContext:    func(ctx context.Context, _ *quic.Conn) context.Context { return withBase(ctx, base) },
		Logger:         slog.New(slog.DiscardHandler),
	}}
	if lanes == nil {
		addr, err := net.ResolveUDPAddr("udp", cfg.Server.HTTP3)
		if err != nil {
			return nil, err
		}
		if q.conn, err = net.ListenUDP("udp", addr); err != nil {
			return nil, err
		}
	} else {
		var err error
		if q.lane, err = openLane(lanes, cfg.Server.HTTP3, q.server); err != nil {
			return nil, err
		}
		q.conn = q.lane.conn.UDPConn
	}
	q.server.Port = q.conn.LocalAddr().(*net.UDPAddr).Port
	checkBuffers(q.conn, log)
	return q, nil
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
	value := fmt.Sprintf(`h3=":%d"; ma=86400`, q.server.Port)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header()["Alt-Svc"] = []string{value}
		h.ServeHTTP(w, r)
	})
}

func (q *quicFront) serve() error {
	var err error
	if q.lane != nil {
		err = q.lane.serve(q.server)
	} else {
		err = q.server.Serve(q.conn)
	}
	if !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, quic.ErrServerClosed) {
		return err
	}
	return nil
}

func (q *quicFront) shutdown(ctx context.Context) error {
	switch {
	case q == nil:
		return nil
	case q.lane != nil:
		return q.lane.shutdown(ctx, q.server)
	}
	return q.server.Shutdown(ctx)
}

func (q *quicFront) close() {
	if q == nil {
		return
	}
	q.server.Close()
	if q.lane != nil {
		q.lane.close()
		return
	}
	q.conn.Close()
}
