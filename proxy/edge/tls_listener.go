package edge

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/edge/acme"
)

// tlsListener does the TLS handshakes of one listener and hands each connection to the
// server of the negotiated protocol. The servers do no handshake of their own, so that a
// framingConn can stand between them and TLS.
type tlsListener struct {
	inner   net.Listener
	config  *tls.Config
	timeout time.Duration
	h1, h2  *handoffListener
	ctx     context.Context // ends when the listener accepts no more connections
	cancel  context.CancelFunc
	done    chan struct{} // closed when run has returned
}

func newTLSListener(inner net.Listener, config *tls.Config, timeout time.Duration) *tlsListener {
	ctx, cancel := context.WithCancel(context.Background())
	return &tlsListener{
		inner: inner, config: config, timeout: timeout, ctx: ctx, cancel: cancel,
		h1: newHandoffListener(inner.Addr()), h2: newHandoffListener(inner.Addr()),
		done: make(chan struct{}),
	}
}

// run accepts until the listener closes. It returns when no handshake runs.
func (l *tlsListener) run() {
	defer close(l.done)
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := l.inner.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(acceptPause) // no descriptor is left: wait until some connections close
			continue
		}
		wg.Go(func() { l.handshake(c) })
	}
}

func (l *tlsListener) handshake(c net.Conn) {
	tc := tls.Server(c, l.config)
	ctx, cancel := context.WithTimeout(l.ctx, l.timeout)
	defer cancel()
	if err := tc.HandshakeContext(ctx); err != nil {
		c.Close()
		return
	}
	to := l.h1
	switch tc.ConnectionState().NegotiatedProtocol {
	case "h2":
		to = l.h2
	case acme.Protocol: // the handshake was the whole answer
		tc.Close()
		return
	}
	if !to.put(tc) {
		tc.Close()
	}
}

// finish waits for the running handshakes after inner has been closed. Then it ends the
// accepting of the servers.
func (l *tlsListener) finish() {
	<-l.done
	l.h1.Close()
	l.h2.Close()
}

func (l *tlsListener) close() {
	l.cancel()
	l.inner.Close()
	l.h1.Close()
	l.h2.Close()
}

// handoffListener is a net.Listener of the connections that put gets.
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
