package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"time"
)

// demux does the TLS handshakes of one listener and hands each connection to
// the server of the protocol that was agreed, both through framingConn.
type demux struct {
	inner   net.Listener
	config  *tls.Config
	timeout time.Duration
	h1, h2  *handoffListener
	ctx     context.Context // ends when no new connection is taken any more
	cancel  context.CancelFunc
	done    chan struct{} // closed when run has returned
}

func newDemux(inner net.Listener, config *tls.Config, timeout time.Duration) *demux {
	ctx, cancel := context.WithCancel(context.Background())
	return &demux{
		inner: inner, config: config, timeout: timeout, ctx: ctx, cancel: cancel,
		h1: newHandoffListener(inner.Addr()), h2: newHandoffListener(inner.Addr()),
		done: make(chan struct{}),
	}
}

// run accepts until the listener closes, and returns when no handshake runs.
func (d *demux) run() {
	defer close(d.done)
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := d.inner.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(5 * time.Millisecond) // out of descriptors: let some close
			continue
		}
		wg.Go(func() { d.handshake(c) })
	}
}

func (d *demux) handshake(c net.Conn) {
	tc := tls.Server(c, d.config)
	ctx, cancel := context.WithTimeout(d.ctx, d.timeout)
	defer cancel()
	if err := tc.HandshakeContext(ctx); err != nil {
		c.Close()
		return
	}
	l := d.h1
	if tc.ConnectionState().NegotiatedProtocol == "h2" {
		l = d.h2
	}
	if !l.put(tc) {
		tc.Close()
	}
}

// finish lets the handshakes under way end, after inner has been closed, and then
// the servers' accepting.
func (d *demux) finish() {
	<-d.done
	d.h1.Close()
	d.h2.Close()
}

func (d *demux) close() {
	d.cancel()
	d.inner.Close()
	d.h1.Close()
	d.h2.Close()
}

// handoffListener is a net.Listener whose connections are put in.
type handoffListener struct {
	addr  net.Addr
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newHandoffListener(addr net.Addr) *handoffListener {
	return &handoffListener{addr: addr, conns: make(chan net.Conn), done: make(chan struct{})}
}

func (l *handoffListener) put(c net.Conn) bool {
	select {
	case l.conns <- c:
		return true
	case <-l.done:
		return false
	}
}

// Accept implements net.Listener.
func (l *handoffListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *handoffListener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

// Addr implements net.Listener.
func (l *handoffListener) Addr() net.Addr { return l.addr }
