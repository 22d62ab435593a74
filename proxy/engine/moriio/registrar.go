// Package moriio is where vLLM engines with the MoRIIOConnector say that they
// are there: a ZMQ ROUTER socket that takes the map which such an engine sends
// every three seconds, in either of its two forms, and makes instances of it.
//
// Registration has no authentication. What comes in is bounded, and checked like
// a configuration; nothing of it is sent to any other engine before its own probe
// has succeeded.
package moriio

import (
	"context"
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

// Registrar is the registry's socket. Its methods may be called once each, Addr
// any time.
type Registrar struct {
	listener net.Listener
	log      *slog.Logger
	places   chan struct{} // one for each connection
	messages chan []byte
}

// Listen opens the socket at "tcp://host:port", where host may be "*"; log may be
// nil. It starts nothing.
func Listen(endpoint string, log *slog.Logger) (*Registrar, error) {
	address, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return nil, fmt.Errorf("listen for registrations: %q is not tcp://host:port", endpoint)
	}
	if rest, all := strings.CutPrefix(address, "*:"); all {
		address = ":" + rest
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen for registrations: %w", err)
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Registrar{listener: l, log: log, places: make(chan struct{}, maxConnections), messages: make(chan []byte)}, nil
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
	b := newBook(r.log)
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
	p, err := greet(conn)
	for err == nil {
		var m []byte
		if m, err = p.message(); err != nil {
			break
		}
		select {
		case r.messages <- m:
		case <-ctx.Done():
			return
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
