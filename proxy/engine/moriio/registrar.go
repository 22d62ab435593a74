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
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

const (
	// Expiry is how long an engine is believed to be there after its last
	// registration: three go missing, and a bit. Source: vLLM moriio_common.py,
	// PING_INTERVAL.
	Expiry = 10 * time.Second
	// checkEvery is how often silent engines are looked for.
	checkEvery = time.Second
	// maxConnections bounds the connections of engines, each of which has one.
	maxConnections = 4096
)

// Options says where the socket is and who may register there.
type Options struct {
	// Endpoint is tcp://host:port, where host may be "*".
	Endpoint string
	// Password is what peers must show, by PLAIN security. "": they must not.
	Password string
	// OwnHost lets a peer register the host that it calls from and no other.
	OwnHost bool
	// Log may be nil.
	Log *slog.Logger
}

// Registrar is the registry's socket. Its methods may be called once each, Addr
// any time.
type Registrar struct {
	o        Options
	listener net.Listener
	log      *slog.Logger
	places   chan struct{} // one for each connection
	messages chan message
}

// message is what one peer said.
type message struct {
	from    string // its address, without a port
	text    []byte
	refused error // why it could not say anything
}

// Listen opens the socket. It starts nothing.
func Listen(o Options) (*Registrar, error) {
	address, ok := strings.CutPrefix(o.Endpoint, "tcp://")
	if !ok {
		return nil, fmt.Errorf("listen for registrations: %q is not tcp://host:port", o.Endpoint)
	}
	if rest, all := strings.CutPrefix(address, "*:"); all {
		address = ":" + rest
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen for registrations: %w", err)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Registrar{o: o, listener: l, log: o.Log, places: make(chan struct{}, maxConnections), messages: make(chan message)}, nil
}

// Name is the source of the engines in the registry.
func (r *Registrar) Name() string { return "zmq" }

// Addr is where engines register.
func (r *Registrar) Addr() net.Addr { return r.listener.Addr() }

// Close closes a socket that Run was not called for.
func (r *Registrar) Close() error { return r.listener.Close() }

// Run takes registrations until ctx ends, and then closes the socket and every
// connection. It calls found, from its own goroutine, with all engines that are
// there as often as that changes.
func (r *Registrar) Run(ctx context.Context, found func([]config.Engine)) {
	ctx, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	defer context.AfterFunc(ctx, func() { r.listener.Close() })()
	wg.Go(func() { r.accept(ctx, &wg) })
	b := newBook(r.log, r.o.OwnHost)
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
		}
		if changed {
			found(b.engines())
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
			defer conn.Close()
			defer context.AfterFunc(ctx, func() { conn.Close() })()
			r.serve(ctx, conn)
		})
	}
}

// serve hands on the messages of one connection until it ends.
func (r *Registrar) serve(ctx context.Context, conn net.Conn) {
	from, _, _ := net.SplitHostPort(conn.RemoteAddr().String())
	p, err := greet(conn, r.o.Password)
	hand := func(m message) {
		select {
		case r.messages <- m:
		case <-ctx.Done():
		}
	}
	if errors.Is(err, errPassword) || errors.Is(err, errGreeting) {
		hand(message{from: from, refused: err})
	}
	for err == nil && ctx.Err() == nil {
		m := message{from: from}
		if m.text, err = p.message(); err == nil {
			hand(m)
		}
	}
	r.log.Debug("a registration's connection ended", "peer", conn.RemoteAddr().String(), "error", err)
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
