// Package moriio is where vLLM engines with the MoRIIOConnector say that they
// are there: a ZMQ ROUTER socket that takes the map which such an engine sends
// every three seconds, in either of its two forms, and makes instances of it.
//
// The engines themselves show nothing that says who they are; Options can ask
// for a password all the same, or for registrations of the peer's own host alone.
// What comes in is bounded, and checked like a configuration; nothing of it is
// sent to any other engine before its own probe has succeeded.
package moriio

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine/registrations"
	"github.com/pdproxy/pdproxy/proxy/engine/zmtp"
)

const (
	// Expiry is how long an engine is believed to be there after its last
	// registration: three go missing, and a bit. Source: vLLM moriio_common.py,
	// PING_INTERVAL.
	Expiry = 10 * time.Second
	// checkEvery is how often silent engines are looked for.
	checkEvery = registrations.WriteEvery
	// maxConnections bounds the connections of engines, each of which has one.
	maxConnections = 4096
	// idleTimeout is how long a connection may take for its next registration.
	idleTimeout = time.Minute
	// maxMessage limits a registration in bytes: it has some 200.
	maxMessage = 16 << 10
	// maxFrames limits its frames: a REQ puts an empty one first.
	maxFrames = 4
)

// Options says where the socket is and who may register there.
type Options struct {
	// Endpoint is tcp://host:port, where host may be "*".
	Endpoint string
	// Password is what peers must show, by PLAIN security. "": they must not.
	Password string
	// OwnHost lets a peer register the host that it calls from and no other.
	OwnHost bool
	// Listener is the socket, if it is already open.
	Listener net.Listener
	// Roster is where others know the engines from; one without a directory: nowhere.
	Registrations *registrations.Store
	// Log may be nil.
	Log *slog.Logger
}

// Registrar is the registry's socket. Run may be called once, and Close instead of
// it; the other methods any time.
type Registrar struct {
	o        Options
	listener net.Listener
	log      *slog.Logger
	places   chan struct{} // one for each connection
	messages chan message
	own      context.Context // ends when the registrations are left to a successor
	release  context.CancelFunc
	released chan struct{} // closed when they are
}

// message is what one peer said.
type message struct {
	from    string // its address, without a port
	text    []byte
	refused error // why it could not say anything
}

// Address is where an endpoint listens, as host:port.
func Address(endpoint string) (string, error) {
	address, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", fmt.Errorf("listen for registrations: %q is not tcp://host:port", endpoint)
	}
	if rest, all := strings.CutPrefix(address, "*:"); all {
		address = ":" + rest
	}
	return address, nil
}

// Listen opens the socket, if it is not open. It starts nothing.
func Listen(o Options) (*Registrar, error) {
	address, err := Address(o.Endpoint)
	if err == nil && o.Listener == nil {
		if o.Listener, err = net.Listen("tcp", address); err != nil {
			err = fmt.Errorf("listen for registrations: %w", err)
		}
	}
	if err != nil {
		return nil, err
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Registrations == nil {
		o.Registrations = registrations.New(nil, "", o.Log)
	}
	r := &Registrar{o: o, listener: o.Listener, log: o.Log, places: make(chan struct{}, maxConnections), messages: make(chan message), released: make(chan struct{})}
	r.own, r.release = context.WithCancel(context.Background())
	return r, nil
}

// Name is the source of the engines in the registry.
func (r *Registrar) Name() string { return "zmq" }

// Addr is where engines register.
func (r *Registrar) Addr() net.Addr { return r.listener.Addr() }

// Listener is the socket, for a successor.
func (r *Registrar) Listener() net.Listener { return r.listener }

// Complete reports whether the engines are known that had registered before this
// process began.
func (r *Registrar) Complete() bool { return r.o.Registrations.Complete() }

// Release leaves the registrations to a successor: when it returns none is accepted
// here any more, and the successor can know all that were. Run goes on with what
// that has.
func (r *Registrar) Release() {
	r.release()
	<-r.released
}

// Close closes a socket that Run was not called for.
func (r *Registrar) Close() error { return r.listener.Close() }

// Run takes registrations until ctx ends, and then closes the socket and every
// connection. It calls found, from its own goroutine, with all engines that are
// there as often as that changes. While another process takes registrations, before
// it is this one's turn and after Release, the engines are those that it has.
func (r *Registrar) Run(ctx context.Context, found func([]config.Engine)) {
	b := newBook(r.log, r.o.OwnHost)
	var last []config.Engine
	told := false
	tell := func() {
		if list := b.engines(); !told || !slices.Equal(list, last) {
			last, told = list, true
			found(list)
		}
	}
	shown := func(entries []registrations.Entry) {
		b.restore(entries, time.Now())
		tell()
	}
	r.runOwner(ctx, b, shown, tell)
	close(r.released)
	r.o.Registrations.Follow(ctx, shown)
}

// runOwner takes registrations, when that is its turn, until they are left to another
// or ctx ends.
func (r *Registrar) runOwner(ctx context.Context, b *book, shown func([]registrations.Entry), tell func()) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(r.own, stop)()
	defer r.listener.Close()
	entries, ok := r.o.Registrations.Acquire(ctx, shown)
	if !ok {
		return
	}
	b.restore(entries, time.Now())
	if len(entries) > 0 || r.Complete() {
		tell()
	}
	r.accepting(ctx, b, tell)
	r.o.Registrations.Release(b.roster(time.Now()))
}

// accepting takes the registrations of those who connect, until ctx ends and every
// connection is closed.
func (r *Registrar) accepting(ctx context.Context, b *book, tell func()) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { r.accept(ctx, &wg) })
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	for {
		changed := false
		select {
		case <-ctx.Done():
			r.listener.Close()
			return
		case m := <-r.messages:
			changed = b.take(m, time.Now())
		case <-tick.C:
			changed = b.expire(time.Now())
			r.o.Registrations.Write(b.roster(time.Now()))
		}
		if changed {
			tell()
		}
	}
}

// accept serves connections until the listener is closed.
func (r *Registrar) accept(ctx context.Context, wg *sync.WaitGroup) {
	for ctx.Err() == nil {
		conn, err := r.listener.Accept()
		if err != nil {
			if ctx.Err() == nil { // out of descriptors, for the moment
				r.log.Warn("a registration was not accepted", "error", err)
				wait(ctx, checkEvery)
			}
			continue
		}
		select {
		case r.places <- struct{}{}:
		default:
			conn.Close()
			continue
		}
		wg.Go(func() {
			defer func() { <-r.places }()
			r.serve(ctx, conn)
		})
	}
}

// serve hands on the messages of one connection until it ends or ctx ends, and
// closes the connection.
func (r *Registrar) serve(ctx context.Context, conn net.Conn) {
	peer := conn.RemoteAddr().String()
	from, _, _ := net.SplitHostPort(peer)
	hand := func(m message) {
		select {
		case r.messages <- m:
		case <-ctx.Done():
		}
	}
	c, err := zmtp.Accept(ctx, conn, r.o.Password, zmtp.Options{Socket: zmtp.Router, MaxMessage: maxMessage, MaxFrames: maxFrames, ReadBuffer: 1 << 10})
	if err == nil {
		defer c.Close()
	} else if errors.Is(err, zmtp.ErrPassword) || errors.Is(err, zmtp.ErrMechanism) {
		hand(message{from: from, refused: err})
	}
	var frames [][]byte
	for err == nil && ctx.Err() == nil {
		if frames, err = c.Receive(idleTimeout); err == nil {
			hand(message{from: from, text: bytes.Clone(frames[len(frames)-1])})
		}
	}
	r.log.Debug("a registration's connection ended", "peer", peer, "error", err)
}

// wait returns after d, or when ctx ends.
func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
