package fleet

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/access"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// pipes is a listener whose connections are pipes, for tests in simulated time. Tests
// can cut the connections and hold their bytes back.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
	certs  *access.Credentials     // for connections that seem to come over a network
	served func(net.Conn) net.Conn // changes the coordinator's ends of connections

	mu   sync.Mutex
	down bool    // guarded by mu
	far  bool    // new connections seem to come from another host; guarded by mu
	made []*held // guarded by mu
}

func newPipes(t testing.TB) *pipes {
	t.Helper()
	certs, err := access.NewCredentials(access.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return &pipes{conns: make(chan net.Conn), closed: make(chan struct{}), certs: certs}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.closed) })
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe"} }

var errDown = errors.New("nobody listens")

// dial connects, unless the listener is down.
func (p *pipes) dial(ctx context.Context) (net.Conn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.down {
		return nil, errDown
	}
	mine, theirs := net.Pipe()
	if p.served != nil {
		theirs = p.served(theirs)
	}
	far := p.far
	if far {
		theirs = farConn{theirs}
	}
	h := &held{Conn: mine, open: make(chan struct{}), closed: make(chan struct{}), late: make(chan struct{})}
	close(h.open)
	select {
	case p.conns <- theirs:
	case <-p.closed:
		return nil, errDown
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	p.made = append(p.made, h)
	if far {
		return p.certs.Secure(ctx, h, "coordinator")
	}
	return h, nil
}

// farConn is a connection that seems to come over a network.
type farConn struct{ net.Conn }

// RemoteAddr implements net.Conn.
func (farConn) RemoteAddr() net.Addr { return &net.TCPAddr{} }

// move makes later connections seem to come from another host.
func (p *pipes) move() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.far = true
}

// last returns the newest connection.
func (p *pipes) last() *held {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.made[len(p.made)-1]
}

// dials returns the number of connections so far.
func (p *pipes) dials() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.made)
}

// fall makes the listener refuse connections (true) or accept them (false).
func (p *pipes) fall(down bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = down
}

// held is one end of a connection between a worker and the coordinator. While it is
// held, its reads wait.
type held struct {
	net.Conn
	once   sync.Once
	closed chan struct{}
	mu     sync.Mutex
	open   chan struct{} // closed while the connection is not held; guarded by mu
	late   chan struct{} // closed when the deadline of reads has passed; guarded by mu
	passed bool          // the deadline has passed; guarded by mu
}

func (h *held) Read(b []byte) (int, error) {
	h.mu.Lock()
	open, late := h.open, h.late
	h.mu.Unlock()
	select {
	case <-open:
	case <-h.closed:
	case <-late:
		return 0, os.ErrDeadlineExceeded
	}
	return h.Conn.Read(b)
}

// SetReadDeadline supports only a deadline in the past, or none.
func (h *held) SetReadDeadline(t time.Time) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if t.IsZero() {
		h.late = make(chan struct{})
	} else if !h.passed {
		close(h.late)
	}
	h.passed = !t.IsZero()
	return h.Conn.SetReadDeadline(t)
}

func (h *held) Close() error {
	h.once.Do(func() { close(h.closed) })
	return h.Conn.Close()
}

// hold makes reads wait.
func (h *held) hold() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.open = make(chan struct{})
}

// let ends the wait of hold.
func (h *held) let() {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.open)
}

// cut closes the connection, as the death of the worker would.
func (h *held) cut() { h.Close() }

// wired is a world whose Client and Server share the simulated time.
type wired struct {
	*world
	pipes   *pipes
	orphans chan string
	stop    context.CancelFunc // of the worker
	gone    sync.WaitGroup     // the worker
	// stopServing ends Serve and waits for it.
	stopServing func()
}

// newWired returns a world over the wire, in simulated time. change adapts its options.
func newWired(t *testing.T, change func(*ServerOptions, *ClientOptions), specs ...string) *wired {
	t.Helper()
	return newWiredAt(t, newPipes(t), change, specs...)
}

// newWiredAt is newWired with the server's listener.
func newWiredAt(t *testing.T, at *pipes, change func(*ServerOptions, *ClientOptions), specs ...string) *wired {
	t.Helper()
	w := &wired{world: newWorld(t, specs...), pipes: at, orphans: make(chan string, 100)}
	mint, err := disaggid.New(1, 3)
	if err != nil {
		t.Fatal(err)
	}
	so := ServerOptions{
		Gate:  access.NewGate(access.GateOptions{Credentials: w.pipes.certs, Log: placetest.Quiet()}),
		Local: w.Local, Log: placetest.Quiet(), Epoch: 5, OnOrphan: func(b []byte) { w.orphans <- string(b) },
	}
	co := ClientOptions{
		Dial:     w.pipes.dial,
		Fallback: placetest.Uncounted{Local: coordinator.NewLocal(w.Reg, placetest.Stub{}, placetest.Builtin(t, "auto", "least_load"), coordinator.State{}, mint, w.Counts)},
		Mirror:   placetest.Same{Reg: w.Reg}, Log: placetest.Quiet(), Observer: w.Counts, Slot: 3, Node: "here",
	}
	if change != nil {
		change(&so, &co)
	}
	w.server = NewServer(so)
	w.use(NewClient(co))
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := w.server.Serve(ctx, w.pipes); err != nil {
			t.Error(err)
		}
	})
	w.stopServing = func() {
		cancel()
		serving.Wait()
	}
	of, stop := context.WithCancel(context.Background())
	w.stop = stop
	w.gone.Go(func() { w.client.Run(of) })
	t.Cleanup(func() {
		stop()
		w.gone.Wait()
		w.stopServing()
	})
	synctest.Wait()
	return w
}

// bubble runs a test of a wired world in simulated time.
func bubble(t *testing.T, name string, change func(*ServerOptions, *ClientOptions), test func(t *testing.T, w *wired), specs ...string) {
	t.Helper()
	if len(specs) == 0 {
		specs = []string{"p prefill", "d decode"}
	}
	t.Run(name, func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) { test(t, newWired(t, change, specs...)) })
	})
}

// later lets the time d pass and waits until all goroutines are blocked.
func later(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}
