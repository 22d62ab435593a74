// Package upstream sends the proxy's HTTP calls to engines. It has its own client for
// HTTP/1.1. It sends header lines
// and bodies unchanged, reads answers in the caller's goroutine, and closes the
// connection when a context ends, which engines notice. A Client belongs to one engine.
// The package knows nothing of phases or protocols.
//
// The decisions behind this package are in docs/design/attempt.md.
package upstream

import (
	"context"
	"crypto/tls"
	"net"
	"net/url"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/proxy/socket"
)

// Field is one header line in wire form: the name as sent, and the value without
// surrounding white space.
type Field struct{ Name, Value string }

// Request is one call to an engine. Do reads it only until Do returns: the caller may
// reuse Body then, also after an error.
type Request struct {
	Method string // GET when empty
	Path   string // the request target: begins with a slash, includes the query
	// Header is sent in order, except Host and Content-Length, which the client writes
	// itself. Transfer-Encoding is rejected. The caller removes other hop-by-hop lines.
	Header []Field
	// Body is sent after the head in one write, as if the pieces were joined.
	Body [][]byte
	// HeadTimeout bounds the time from the first byte written to the head of the
	// answer, and before that the wait for a connection at the cap. 0: no limit.
	HeadTimeout time.Duration
	// SendBy is the latest time at which the engine must have all of the request. After
	// it, no write begins and a write in progress is interrupted. Zero: no limit.
	SendBy time.Time
	// IdleTimeout bounds the wait of each Read of the body. 0: no limit.
	IdleTimeout time.Duration
	// Once: the engine must not receive the request twice. A leg whose id has met its
	// peer may have read KV blocks, and these may be freed before a second try. With
	// Once, the client repeats the request on another connection only if no byte of the
	// request can have been sent. Without Once, it also repeats the request if a reused
	// connection is found dead.
	Once bool
	// Sent, if not nil, is called when all of the request has been passed to the
	// connection, before the wait for the answer. The caller is the goroutine of Do.
	// Each repetition of the request calls Sent again. Sent
	// must not block.
	Sent func()
	// Hints, if not nil, gets the header lines of each answer 103 before the final answer (RFC
	// 8297), in the goroutine of Do. They are valid until EarlyHints returns.
	Hints interface{ EarlyHints(fields []Field) }
	// Linger changes what happens when the context ends after the request has been sent.
	// 0: the client closes the connection at once. Otherwise the connection stays open
	// and the call continues for at most Linger. If an answer arrives within that time,
	// Do returns it, so the caller learns that the engine had finished. Closing only the
	// sending side would not work: asyncio servers treat this as a hang-up and drop the
	// answer, although the engine can no longer stop.
	Linger time.Duration
	// Control, if not nil, decides whether the call is sent, whether it lingers and
	// whether EvictIdle or Withdraw ends it. Both call it until the answer has ended or
	// Response.Commit was called.
	Control CallControl
	// Detach keeps the connection of a call that is evicted after all of the request
	// was sent and before any of the answer came. The engine may become responsive
	// again and answer: see Error.Detached.
	Detach bool
	// KeepLate does the same for a call whose HeadTimeout has passed: the Error is a
	// timeout and has a Detached.
	KeepLate bool
}

// Client calls one engine. All methods are safe for concurrent use.
type Client interface {
	// Do sends req and waits for the head of the answer, whatever its status. Every error
	// is an *Error. The end of ctx closes the connection, also after Do has returned,
	// unless the call lingers. A Read or Do in progress then fails with the context's
	// error. After the end of the body the end of ctx has no effect. The caller must
	// Close the Response.
	Do(ctx context.Context, req *Request) (*Response, error)
	// EvictIdle ends the calls whose Control agrees; they fail with ErrEvicted. The
	// registry calls it when an engine becomes unresponsive or its streams are to move, and
	// repeatedly while that lasts. engine identifies that engine to Control. EvictIdle does nothing
	// if bytes came on any call of this client within quiet.
	EvictIdle(engine any, quiet time.Duration)
	// Withdraw treats the calls whose Control does not want them any more as if their
	// contexts had ended: the connection is closed, or the call lingers. Without an answer
	// they fail with ErrUnwanted. Calls that wait for a connection keep their places.
	Withdraw()
	// CloseIdle closes the connections that no call is using.
	CloseIdle()
	// Stats returns the present counts.
	Stats() Stats
}

// Stats counts one Client's connections.
type Stats struct {
	Open    int // connections, in use or idle, and those being dialed
	Idle    int // idle ones of these
	Waiting int // calls that wait because of MaxConns
	Dials   uint64
	Reuses  uint64 // calls that began on a reused connection
	Retries uint64 // calls repeated because a reused connection was dead
}

// Options configures a Client. The zero value of each field except URL is usable.
type Options struct {
	URL      *url.URL    // scheme http or https, and host; other parts are ignored
	TLS      *tls.Config // for https; an empty server name means that of the URL
	MaxConns int         // maximum of open connections, 0: none
	MaxIdle  int         // maximum of idle connections, 0: 1024

	// IdleTimeout closes a connection that no call has used for this time. 0: 4 s, less
	// than the 5 s after which uvicorn closes it.
	IdleTimeout time.Duration
	// DialTimeout bounds name lookup, connect and TLS handshake. 0: 5 s.
	DialTimeout time.Duration
	// WriteTimeout bounds the sending of a request to an engine that does not read. 0:
	// 30 s. A shorter HeadTimeout bounds it too. It also bounds how long a host may
	// acknowledge nothing before its connections fail (without Dial).
	WriteTimeout time.Duration
	// MaxHeadBytes bounds the head of an answer. 0: 64 KiB.
	MaxHeadBytes int
	// Dial replaces the network dialer, for tests and Unix sockets.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

// dialer returns a network dialer whose connections detect that the other host has lost
// its power or its link. Without this detection, a call that waits for an answer would
// fail only after the time-out for a slow engine.
func (o *Options) dialer() *net.Dialer {
	limit := o.WriteTimeout
	return &net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: limit / 3, Interval: limit / 6, Count: 4},
		Control: func(_, _ string, c syscall.RawConn) error {
			return socket.GiveUpAfter(c, limit)
		},
	}
}

// withDefaults returns o with its defaults in place of zeros.
func (o Options) withDefaults() Options {
	setDefault(&o.MaxIdle, 1024)
	setDefault(&o.IdleTimeout, 4*time.Second)
	setDefault(&o.DialTimeout, 5*time.Second)
	setDefault(&o.WriteTimeout, 30*time.Second)
	setDefault(&o.MaxHeadBytes, 64<<10)
	if o.Dial == nil {
		o.Dial = o.dialer().DialContext
	}
	if o.URL == nil {
		o.URL = new(url.URL)
	}
	return o
}

func setDefault[T int | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// address returns the address to dial: the URL's host, with the scheme's port if the
// URL has none.
func (o Options) address() string {
	port := o.URL.Port()
	if port == "" {
		port = "80"
		if o.secure() {
			port = "443"
		}
	}
	return net.JoinHostPort(o.URL.Hostname(), port)
}

func (o Options) secure() bool { return o.URL.Scheme == "https" }

// checkURL rejects a URL that no call can reach.
func (o Options) checkURL() error {
	if (o.URL.Scheme != "http" && o.URL.Scheme != "https") || o.URL.Hostname() == "" {
		return errBadURL
	}
	return nil
}

// tlsConfig returns the TLS configuration of one client: a copy with server name,
// protocols and a session cache, so that a burst of connections to one engine costs one
// full handshake.
func (o Options) tlsConfig(protocols ...string) *tls.Config {
	cfg := o.TLS.Clone()
	if cfg == nil {
		cfg = new(tls.Config)
	}
	if cfg.ServerName == "" {
		cfg.ServerName = o.URL.Hostname()
	}
	if cfg.ClientSessionCache == nil {
		cfg.ClientSessionCache = tls.NewLRUClientSessionCache(8)
	}
	cfg.NextProtos = protocols
	return cfg
}
