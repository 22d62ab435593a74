// Package extproc is a client of Envoy's external processing protocol (ext_proc), in the way in
// which a gateway uses it with an endpoint picker of the Gateway API Inference Extension: one
// stream for each request, bodies in FULL_DUPLEX_STREAMED mode. The picker chooses the endpoints
// from the request, may change the request or refuse it, and then sees the answer.
//
// Sources: envoy api/envoy/service/ext_proc/v3/external_processor.proto;
// gateway-api-inference-extension docs/proposals/004-endpoint-picker-protocol.
//
// The decisions behind this package are in docs/design/gateway.md.
package extproc

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"time"

	service "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/pdproxy/pdproxy/proxy/circuit"
)

// Options configure a Client.
type Options struct {
	Address string        // host:port of the picker
	TLS     *tls.Config   // nil: no TLS
	Timeout time.Duration // for the choice, and for the picker's answer to the head of an engine's answer
	MaxBody int           // largest body that the picker may return, in bytes
	// Dial connects to the picker. nil: by TCP.
	Dial func(ctx context.Context, address string) (net.Conn, error)
}

// Limits of the connection and of messages.
const (
	// pingAfter is the time without traffic after which the picker must answer a ping within
	// pingTimeout. A server of grpc-go closes connections with more frequent pings.
	pingAfter   = 5*time.Minute + 10*time.Second
	pingTimeout = 10 * time.Second
	// connectTimeout bounds one try to connect; maxBackoff bounds the time between two tries.
	connectTimeout = 5 * time.Second
	maxBackoff     = time.Second
	// headRoom is the room in a message for header lines and metadata, in bytes.
	headRoom = 1 << 20
	// MaxPart is the largest part of a body in one message, in bytes. Some pickers accept 64 KiB
	// with the message's own overhead.
	MaxPart = 62000
	// The circuit of the choices opens after opensAfter failures in a row, and the circuit of the
	// heads after one late answer to a head. Each stays open for openFor.
	opensAfter = 5
	openFor    = time.Second
	// finishLimit is how long the picker may take to end a stream after the end of the answer.
	finishLimit = 5 * time.Second
)

// Reasons of an Error. They are labels of metrics.
const (
	Timeout      = "timeout"       // no choice within Options.Timeout
	Unavailable  = "unavailable"   // no connection, or the connection broke
	CircuitOpen  = "circuit_open"  // the last requests failed: this one was not sent
	StreamClosed = "stream_closed" // the picker ended the stream without a choice
	BadAnswer    = "bad_answer"    // the picker's messages break the protocol
)

// Error is the reason why there is no choice.
type Error struct {
	Reason string
	err    error // nil: Reason says all
}

func (e *Error) Error() string {
	if e.err == nil {
		return "the endpoint picker: " + e.Reason
	}
	return "the endpoint picker: " + e.Reason + ": " + e.err.Error()
}

// Unwrap returns the cause; nil for none.
func (e *Error) Unwrap() error { return e.err }

// Client sends requests to one picker, over one connection that it opens again when needed.
// Safe for concurrent use.
type Client struct {
	options Options
	choices circuit.Breaker // keeps a picker that hangs or is away from costing every request its time-out
	heads   circuit.Breaker // the same for the answer to the head of an answer

	mu     sync.Mutex
	conn   *grpc.ClientConn // nil: closed, and no stream is open; guarded by mu
	users  int              // open streams; guarded by mu
	closed bool             // guarded by mu
}

// New returns a client. It connects when the first request comes.
func New(o Options) (*Client, error) {
	conn, err := connection(&o)
	if err != nil {
		return nil, err
	}
	c := &Client{options: o, conn: conn}
	c.choices.Init(circuit.Options{Rules: circuit.Fixed(opensAfter, openFor)})
	c.heads.Init(circuit.Options{Rules: circuit.Fixed(1, openFor)})
	return c, nil
}

// connection returns a connection to the picker that connects when the first request comes.
func connection(o *Options) (*grpc.ClientConn, error) {
	transport := insecure.NewCredentials()
	if o.TLS != nil {
		transport = credentials.NewTLS(o.TLS)
	}
	target := "dns:///" + o.Address
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithDisableServiceConfig(), grpc.WithNoProxy(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(o.MaxBody + headRoom)),
		grpc.WithMaxHeaderListSize(headRoom),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingAfter, Timeout: pingTimeout}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: maxBackoff / 10, Multiplier: 2, Jitter: .2, MaxDelay: maxBackoff},
			MinConnectTimeout: connectTimeout,
		}),
	}
	if o.Dial != nil {
		target = "passthrough:///" + o.Address
		options = append(options, grpc.WithContextDialer(o.Dial))
	}
	return grpc.NewClient(target, options...)
}

// Close closes the connection as soon as no stream is open. A request that has waited for its
// place since before may follow: it opens a connection for itself. A nil Client is allowed.
func (c *Client) Close() {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.hangUp()
}

// hangUp closes the connection of a closed client without streams. c.mu is held.
func (c *Client) hangUp() {
	if c.closed && c.users == 0 && c.conn != nil {
		c.conn.Close()
		c.conn = nil
	}
}

// enter counts a stream that opens. The caller calls leave at its end, also after an error.
func (c *Client) enter() (service.ExternalProcessorClient, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.users++
	if c.conn == nil {
		var err error
		if c.conn, err = connection(&c.options); err != nil {
			return nil, err
		}
	}
	return service.NewExternalProcessorClient(c.conn), nil
}

// leave counts the end of a stream.
func (c *Client) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.users--
	c.hangUp()
}

// errTimeout is the cause of the end of a stream whose choice comes too late.
var errTimeout = errors.New("the picker did not answer in time")

// Pick asks the picker for its choice for a request. The stream shows the picker the answer: the
// caller ends it by End or Abort, exactly once. The end of ctx aborts the stream too. The error
// is the cause of the end of ctx, or an *Error; then there is no stream. Without an error, the
// stream of a decision that refuses the request has ended.
func (c *Client) Pick(ctx context.Context, r *Request) (*Stream, *Decision, error) {
	if !c.choices.Allow() {
		return nil, nil, &Error{Reason: CircuitOpen}
	}
	s := c.open(ctx)
	late := time.AfterFunc(c.options.Timeout, func() { s.cancel(errTimeout) })
	d, err := s.ask(r)
	late.Stop()
	if err == nil && d.Refusal == nil {
		c.choices.Success()
		return s, d, nil
	}
	cause := context.Cause(s.ctx)
	s.Abort()
	<-s.done // the receiver reads the request's body until then
	if err == nil {
		c.choices.Success()
		return nil, d, nil
	}
	if ctx.Err() != nil {
		return nil, nil, context.Cause(ctx)
	}
	failed := c.failure(err, cause)
	switch failed.Reason {
	case Timeout, Unavailable:
		c.choices.Failure()
	default:
		c.choices.Success()
	}
	return nil, nil, failed
}

// failure returns the reason for an error of a stream, whose context has ended for that cause.
func (c *Client) failure(err, cause error) *Error {
	var known *Error
	switch {
	case errors.Is(cause, errTimeout):
		return &Error{Reason: Timeout}
	case errors.As(err, &known):
		return known
	case status.Code(err) == codes.Unavailable, status.Code(err) == codes.Canceled:
		return &Error{Reason: Unavailable, err: err}
	}
	return &Error{Reason: StreamClosed, err: err}
}
