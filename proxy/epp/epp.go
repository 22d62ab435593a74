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
	"errors"
	"log/slog"
	"math"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	service "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connlimit"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
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

// Limits of connections and messages.
const (
	handshakeTimeout = 10 * time.Second
	// pingAfter is the time without traffic after which a gateway must answer a ping within
	// pingTimeout. The leases of its requests end with its connection.
	pingAfter   = 20 * time.Second
	pingTimeout = 10 * time.Second
	// leastPing is the shortest time between the pings of a gateway.
	leastPing = time.Second
	// headRoom is the room for metadata in a message with header lines or with a body, in bytes.
	headRoom = 1 << 20
	// maxMetadata bounds the header lines of one gRPC stream, in bytes. The header of the
	// client's request is in a message.
	maxMetadata = 16 << 10
	// window is the flow control window of one stream, and connWindow that of one
	// connection, in bytes.
	window     = 1 << 20
	connWindow = 16 << 20
	// connBuffer is the size of the buffers of one connection, in bytes: a part of a body is read
	// and written at once.
	connBuffer = 128 << 10
	// streamWorkers is the number of goroutines that wait for the next stream, so that a short
	// request needs no new stack. Further streams get goroutines of their own.
	streamWorkers = 32
	// healthCheck is the time between two updates of the health service.
	healthCheck = 100 * time.Millisecond
)

// The services of the health protocol, as the endpoint picker protocol names them.
const (
	serviceLive  = "liveness"
	serviceReady = "readiness"
)

// Server is the endpoint picker. Safe for concurrent use.
type Server struct {
	service.UnimplementedExternalProcessorServer
	options      Options
	grpc         *grpc.Server
	health       *health.Server
	destinations destinations
	unused       unused
	arrivals     arrivals
	misused      lograte.Limiter[string] // decides which misuses are logged, by their text
	running      context.Context         // ends when the streams must end
	cut          context.CancelCauseFunc
	retired      atomic.Bool  // a successor serves the address
	requested    atomic.Int64 // when the last stream for a request began, in Unix ns
}

// New returns a server. It starts nothing.
func New(o Options) *Server {
	s := &Server{options: o, health: health.NewServer(), destinations: destinations{registry: o.Registry, log: o.Log}, misused: lograte.Limiter[string]{Every: time.Minute}}
	s.arrivals.memory, s.arrivals.least = o.Memory, 2*int64(o.MaxBody+headRoom)
	s.running, s.cut = context.WithCancelCause(context.Background())
	decompressor := grpc.RPCDecompressor(uncompressed{}) //lint:ignore SA1019 only this option refuses a compressed message before it grows
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(o.MaxBody + headRoom), grpc.MaxHeaderListSize(maxMetadata),
		grpc.MaxConcurrentStreams(uint32(min(o.MaxExchanges, math.MaxInt32-maxUnused) + maxUnused)), grpc.InTapHandle(s.tap),
		grpc.InitialWindowSize(window), grpc.InitialConnWindowSize(connWindow),
		grpc.ReadBufferSize(0), decompressor, grpc.WriteBufferSize(connBuffer), grpc.NumStreamWorkers(streamWorkers),
		grpc.ConnectionTimeout(handshakeTimeout), grpc.ForceServerCodecV2(newCodec()),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: pingAfter, Timeout: pingTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: leastPing, PermitWithoutStream: true}),
	}
	handshake := insecure.NewCredentials()
	if o.TLS != nil {
		handshake = credentials.NewTLS(o.TLS)
	}
	options = append(options, grpc.Creds(transport{handshake}))
	s.grpc = grpc.NewServer(options...)
	service.RegisterExternalProcessorServer(s.grpc, s)
	grpc_health_v1.RegisterHealthServer(s.grpc, s.health)
	s.health.SetServingStatus("", grpc_health_v1.HealthCheckResponse_SERVING)
	s.health.SetServingStatus(serviceLive, grpc_health_v1.HealthCheckResponse_SERVING)
	s.setReady(o.Ready())
	return s
}

// Serve serves l until ctx ends. Then it accepts no streams and waits for the open ones, at most
// limit() long. It then ends the rest: gateways continue with these requests by themselves.
// Serve closes l and returns when no stream is open. Call it once.
func (s *Server) Serve(ctx context.Context, l net.Listener, limit func() time.Duration) error {
	s.setReady(s.options.Ready()) // before the first gateway checks the health
	checked := make(chan struct{})
	checking, stop := context.WithCancel(ctx)
	go func() { // ends with ctx or with Serve
		defer close(checked)
		s.checkHealth(checking)
	}()
	drained := make(chan struct{})
	draining := context.AfterFunc(ctx, func() {
		defer close(drained)
		s.drain(limit())
	})
	err := s.grpc.Serve(listener{l, connlimit.New(), &s.arrivals})
	if !draining() {
		<-drained
	}
	stop()
	<-checked
	s.Cut()
	if errors.Is(err, grpc.ErrServerStopped) { // ctx ended before the service had begun
		return nil
	}
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
	for s.arrivals.connected() && time.Since(begin) < limit {
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
func (s *Server) Cut() { s.cut(downstream.ErrDraining) }

// drain ends the service. It returns when no stream is open.
func (s *Server) drain(limit time.Duration) {
	s.unready()
	over := time.AfterFunc(limit, s.Cut)
	defer over.Stop()
	s.grpc.GracefulStop()
}

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
			s.setReady(s.options.Ready())
		}
	}
}

// unready reports to gateways that the address takes no more requests.
func (s *Server) unready() {
	if !s.retired.Load() {
		s.setReady(false)
	}
}

func (s *Server) setReady(ready bool) {
	status := grpc_health_v1.HealthCheckResponse_NOT_SERVING
	if ready {
		status = grpc_health_v1.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus(serviceReady, status)
	s.health.SetServingStatus(service.ExternalProcessor_ServiceDesc.ServiceName, status)
}
