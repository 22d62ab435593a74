// Package moriio accepts the registrations of vLLM engines with the MoRIIOConnector. Such
// an engine sends a map every three seconds, in one of two forms. A ZMQ ROUTER socket
// receives the maps, and the package converts them to instances.
//
// The engines do not authenticate. Options can nevertheless require a password, or accept
// only registrations of the peer's own host. All input is bounded, and validated like a
// configuration. No other engine receives data from a registration before the proxy's
// probe of the registering engine has succeeded.
//
// The decisions behind this package are in docs/design/engines.md.
package moriio

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connlimit"
	"github.com/pdproxy/pdproxy/proxy/engine/registrations"
	"github.com/pdproxy/pdproxy/proxy/engine/zmtp"
)

const (
	// Expiry is how long an engine stays after its last registration: a little longer
	// than three missed ones. Source: vLLM moriio_common.py, PING_INTERVAL.
	Expiry = 10 * time.Second
	// checkEvery is how often expired engines are removed.
	checkEvery = registrations.WriteEvery
	// idleTimeout is how long a connection may wait for its next registration.
	idleTimeout = time.Minute
	// maxMessage bounds a registration in bytes: it has about 200.
	maxMessage = 16 << 10
	// maxFrames bounds its frames: a REQ socket puts an empty one first.
	maxFrames = 4
)

// Options configures a Registrar.
type Options struct {
	// Endpoint is tcp://host:port, where host may be "*".
	Endpoint string
	// Password is required of peers, by PLAIN security. "": none.
	Password string
	// OwnHost allows a peer to register only the host from which it connects.
	OwnHost bool
	// Listener is the open socket, or nil.
	Listener net.Listener
	// Registrations stores the engines for other processes. A store without a directory
	// stores none.
	Registrations *registrations.Store
	// Log may be nil.
	Log *slog.Logger
}

// Registrar is the socket for registrations. Either Run or Close may be called, once.
// The other methods may be called at any time.
type Registrar struct {
	o        Options
	listener net.Listener
	log      *slog.Logger
	places   *connlimit.Limit // each engine has one connection
	messages chan message
	own      context.Context // ends when a successor takes over the registrations
	release  context.CancelFunc
	released chan struct{} // closed after the release
}

// message is one message of a peer.
type message struct {
	from    string // address of the peer, without port
	text    []byte
	refused error // why the peer's connection was rejected
}

// Address returns the address of an endpoint as host:port.
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

// Listen opens the socket unless it is already open. It starts nothing.
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
	r := &Registrar{o: o, listener: o.Listener, log: o.Log, places: connlimit.New(), messages: make(chan message), released: make(chan struct{})}
	r.own, r.release = context.WithCancel(context.Background())
	return r, nil
}

// Name is the source of the engines in the registry.
func (r *Registrar) Name() string { return "zmq" }

// Addr returns the address at which engines register.
func (r *Registrar) Addr() net.Addr { return r.listener.Addr() }

// Listener returns the socket, for a successor.
func (r *Registrar) Listener() net.Listener { return r.listener }

// Complete reports whether the engines that registered before this process began are
// known.
func (r *Registrar) Complete() bool { return r.o.Registrations.Complete() }

// Release gives the registrations to a successor. When it returns, this process accepts
// no more registrations, and the successor can read all of them. Run continues with the
// engines that register at the successor.
func (r *Registrar) Release() {
	r.release()
	<-r.released
}

// Close closes the socket. It is for a Registrar whose Run is not called.
func (r *Registrar) Close() error { return r.listener.Close() }

// Run accepts registrations until ctx ends, and then closes the socket and every
// connection. It calls found, from its own goroutine, with all engines whenever they
// change. Another process may accept the registrations: before this process has the lock,
// and after Release. During these times found gets the engines of the other process.
func (r *Registrar) Run(ctx context.Context, found func([]config.Engine)) {
	b := newBook(r.log, r.o.OwnHost)
	tell := registrations.OnChange(b.engines, found)
	shown := func(entries []registrations.Entry) {
		b.restore(entries, time.Now())
		tell()
	}
	r.runOwner(ctx, b, shown, tell)
	close(r.released)
	r.o.Registrations.Follow(ctx, shown)
}

// runOwner waits for its turn and accepts registrations, until Release or the end of
// ctx.
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
	r.registerAll(ctx, b, tell)
	r.o.Registrations.Release(b.export(time.Now()))
}

// registerAll applies the registrations of all connections, until ctx ends and every
// connection is closed.
func (r *Registrar) registerAll(ctx context.Context, b *book, tell func()) {
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
			changed = b.register(m, time.Now())
		case <-tick.C:
			changed = b.expire(time.Now())
			r.o.Registrations.Write(b.export(time.Now()))
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
			if ctx.Err() == nil { // temporarily out of descriptors
				r.log.Warn("a registration was not accepted", "error", err)
				wait(ctx, checkEvery)
			}
			continue
		}
		place := r.places.Enter(conn) // never nil: no connection is ever busy
		wg.Go(func() {
			defer place.Leave()
			r.serve(ctx, conn, place)
		})
	}
}

// serve passes on the messages of one connection until it or ctx ends, and closes the
// connection.
func (r *Registrar) serve(ctx context.Context, conn net.Conn, place *connlimit.Place) {
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
			place.Touch()
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
