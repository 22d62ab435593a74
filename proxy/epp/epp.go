// Package epp is the endpoint picker for gateways: it serves Envoy's external processing
// protocol (ext_proc) and the endpoint picker protocol of the Gateway API Inference Extension.
// Each gRPC stream is one request of a client. The package gives the request to the handler of
// the proxy as if the client had sent it here, tells the gateway the chosen engine, and reports
// the answer, which the gateway shows.
//
// Sources: envoy api/envoy/service/ext_proc/v3/external_processor.proto;
// gateway-api-inference-extension docs/proposals/004-endpoint-picker-protocol.
//
// The decisions behind this package are in docs/design/gateway.md.
package epp

import (
	"context"
	"crypto/tls"
	"log/slog"
	"math"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/epp/grpcserver"
	"github.com/pdproxy/pdproxy/proxy/lograte"
)

// Options are the parts that a Server uses.
type Options struct {
	// Handle serves one request. If it calls Forward of g, the gateway sends the request;
	// otherwise the gateway sends the answer that Handle has written to w. If Handle writes
	// nothing, the stream fails.
	Handle   func(w http.ResponseWriter, r *http.Request, g attempt.Gateway)
	Registry *engine.Registry
	// Prefix returns the part of a path before its longest end that is the path of an endpoint.
	// It returns "" if the whole path is one, or no end is one.
	Prefix func(path string) string
	// Metadata returns the namespace of the facts about requests; "": none.
	Metadata func() string
	// TrustPD reports whether clients may coordinate KV transfers.
	TrustPD func() bool
	Ready   func() bool // reports whether a request could be served now
	MaxBody int         // largest request body, in bytes; one message may have the whole body
	// MaxHeader is the largest header of a request, in bytes.
	MaxHeader int
	Memory    *buffer.Budget // counts the messages
	// MaxExchanges is the number of requests that the process serves at a time, with those
	// that wait.
	MaxExchanges int
	HeadTimeout  time.Duration // bounds the time from the begin of a stream to its first message
	TLS          *tls.Config   // nil: no TLS
	Log          *slog.Logger
}

const (
	// headRoom is the room for metadata in a message with header lines or with a body, in bytes.
	headRoom = 1 << 20
	// healthCheck is the time between two updates of the health service.
	healthCheck = 100 * time.Millisecond
)

// methodProcess is the path of the method that gateways call; envoy/service/ext_proc/v3/external_processor.proto.
const (
	serviceProcessor = "envoy.service.ext_proc.v3.ExternalProcessor"
	methodProcess    = "/" + serviceProcessor + "/Process"
)

// Server is the endpoint picker. Safe for concurrent use.
type Server struct {
	options      Options
	grpc         *grpcserver.Server
	health       health
	destinations destinations
	misused      lograte.Limiter[string] // decides which misuses are logged, by their text
	retired      atomic.Bool             // a successor serves the address
	requested    atomic.Int64            // when the last stream for a request began, in Unix ns
}

// New returns a server. It starts nothing.
func New(o Options) *Server {
	s := &Server{options: o, destinations: destinations{registry: o.Registry, log: o.Log}, misused: lograte.Limiter[string]{Every: time.Minute}}
	methods := map[string]grpcserver.Method{methodProcess: {Serve: s.process, Request: true}}
	s.health.add(methods)
	s.grpc = grpcserver.New(grpcserver.Options{
		Methods: methods, MaxMessage: o.MaxBody + headRoom, MaxStreams: min(o.MaxExchanges, math.MaxInt32-grpcserver.MaxUnused) + grpcserver.MaxUnused,
		FirstMessage: o.HeadTimeout, Memory: o.Memory, TLS: o.TLS, Log: o.Log,
	})
	s.health.ended = s.grpc.Draining()
	s.health.set(o.Ready())
	return s
}

// Serve serves l until ctx ends. Then it accepts no streams and waits for the open ones, at most
// limit() long. It then ends the rest: gateways continue with these requests by themselves.
// Serve closes l and returns when no stream is open. Call it once.
func (s *Server) Serve(ctx context.Context, l net.Listener, limit func() time.Duration) error {
	s.health.set(s.options.Ready()) // before the first gateway checks the health
	checked := make(chan struct{})
	checking, stop := context.WithCancel(ctx)
	go func() { // ends with ctx or with Serve
		defer close(checked)
		s.checkHealth(checking)
	}()
	var over *time.Timer
	drained := make(chan struct{})
	draining := context.AfterFunc(ctx, func() {
		defer close(drained)
		s.unready()
		over = time.AfterFunc(limit(), s.Cut)
		s.grpc.Drain()
	})
	err := s.grpc.Serve(l)
	if !draining() {
		<-drained
		over.Stop()
	}
	stop()
	<-checked
	s.Cut()
	return err
}

// Linger keeps a server, which must report that it is not ready, while gateways still send requests
// to it: until no gateway is connected, or no request has begun for quiet, or limit is over. quiet
// begins with Linger: gateways need time to notice. Linger changes nothing in the service, and also
// returns when ctx ends.
func (s *Server) Linger(ctx context.Context, quiet, limit time.Duration) {
	begin := time.Now()
	tick := time.NewTicker(healthCheck)
	defer tick.Stop()
	for s.grpc.Connected() && time.Since(begin) < limit {
		if last := time.Unix(0, s.requested.Load()); time.Since(begin) >= quiet && time.Since(last) >= quiet {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Retire prepares the end of Serve for a server whose address a successor serves: the health
// service goes on reporting that the picker is ready. Otherwise gateways would take the whole
// address for unhealthy until they check the successor.
func (s *Server) Retire() { s.retired.Store(true) }

// Cut ends all open streams. Gateways continue with these requests by themselves.
func (s *Server) Cut() { s.grpc.Cut(downstream.ErrDraining) }

// checkHealth keeps the health service up to date until ctx ends.
func (s *Server) checkHealth(ctx context.Context) {
	tick := time.NewTicker(healthCheck)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			s.unready()
			return
		case <-tick.C:
			s.health.set(s.options.Ready())
		}
	}
}

// unready reports to gateways that the address takes no more requests.
func (s *Server) unready() {
	if !s.retired.Load() {
		s.health.set(false)
	}
}
