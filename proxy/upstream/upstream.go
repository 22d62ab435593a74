// Package upstream owns the proxy's HTTP calls to engines: a client of its own
// for HTTP/1.1, and net/http's Transport behind the same interface. It sends
// header lines and bodies as they are given, reads answers in the caller's
// goroutine, and turns the end of a context into a hang-up that engines notice.
// A Client belongs to one engine. It knows nothing of phases or protocols.
package upstream

import (
	"context"
	"crypto/tls"
	"net"
	"net/url"
	"syscall"
	"time"
)

// Field is one header line in wire form: the name as it is sent, the value
// without surrounding white space.
type Field struct{ Name, Value string }

// Request is one call to an engine. Do reads it only until it returns: Body may
// be reused then, also after an error.
type Request struct {
	Method string // GET when empty
	Path   string // the request target: begins with a slash, includes the query
	// Header is sent in order, less Host and Content-Length, which the client
	// writes itself. Transfer-Encoding is refused. The other hop-by-hop lines
	// are the caller's to remove.
	Header []Field
	// Body is sent after the head in one write, as if the pieces were joined.
	Body [][]byte
	// HeadTimeout bounds the time from the first byte written to the head of
	// the answer, and before that the wait for a connection at the cap. 0: none.
	HeadTimeout time.Duration
	// SendBy is when the engine must have all of the request at the latest: later it
	// is not begun, and what is being sent is broken off. Zero: any time.
	SendBy time.Time
	// IdleTimeout bounds the wait of any one Read of the body. 0: none.
	IdleTimeout time.Duration
	// Once says that the engine must not see the request twice: a leg whose id
	// has met its peer may have read KV blocks that are free by the second time.
	// It is then not repeated on another connection, unless none of it can have
	// left. Else a reused connection that turns out to be dead is replaced.
	Once bool
	// Sent, if not nil, is called when all of the request has been handed to the
	// connection, before the answer is waited for: by the goroutine of Do or by one
	// of the transport's, and again where the request is repeated. It must not
	// block.
	Sent func()
	// Linger changes what happens when the context ends after the request has
	// been sent. 0: the connection is closed at once. Else it is left whole, and
	// the call goes on for at most Linger before it is closed: an answer that
	// comes after all is returned and can be read, so that the caller learns
	// that the engine had finished. To close the sending side alone would not
	// do: servers on asyncio take that as a hang-up, and throw away the answer
	// of an engine that no longer can stop.
	Linger time.Duration
	// Waiter, if not nil, is asked whether the call is to be sent, to linger, and, by
	// Abandon, to be left: the latter until the answer has ended or Response.Commit
	// was called.
	Control CallControl
	// Keep says that a call which is left when all of the request is out, and none
	// of the answer is there, is not hung up on: the engine may come back and
	// answer it, which the Error's Left tells. NewNetHTTP's client hangs up.
	Detach bool
	// KeepLate says the same of a call whose HeadTimeout has passed: the Error is a
	// timeout and has a Left.
	KeepLate bool
}

// Client calls one engine. All methods may be called by many goroutines.
type Client interface {
	// Do sends req and waits for the head of the answer, whatever its status.
	// Any error is an *Error. The end of ctx, also after Do has returned,
	// closes the connection, unless it lingers, and is the error of the call
	// under way; after the body's end it means nothing. The caller must Close
	// the Response.
	Do(ctx context.Context, req *Request) (*Response, error)
	// EvictIdle is called when an engine has fallen silent, and again as long as it
	// is: the calls whose Waiter wants to leave because of that fail with
	// ErrEvicted. silent is who it is, for the waiters. If anything has come on
	// any call of this client within quiet it does nothing.
	EvictIdle(silent any, quiet time.Duration)
	// CloseIdle closes the connections that no call is using.
	CloseIdle()
	// Stats returns the present counts.
	Stats() Stats
}

// Stats counts one Client's connections.
type Stats struct {
	Open    int // connections, in use or idle, and those being dialed
	Idle    int // of these, waiting for a call
	Waiting int // calls held up by MaxConns
	Dials   uint64
	Reuses  uint64 // calls begun on a connection that had served another
	Retries uint64 // calls repeated because such a connection was dead
}

// Options configures a Client. The zero value of each field but URL is usable.
type Options struct {
	URL      *url.URL    // scheme http or https, and host; the rest is ignored
	TLS      *tls.Config // for https; the server name is the URL's host when empty
	MaxConns int         // cap of open connections, 0: none
	MaxIdle  int         // cap of idle connections, 0: 1024

	// IdleTimeout closes a connection that no call has used for so long.
	// 0: 4 s, which is below the 5 s after which uvicorn hangs up.
	IdleTimeout time.Duration
	// DialTimeout bounds name lookup, connect and TLS handshake. 0: 5 s.
	DialTimeout time.Duration
	// WriteTimeout bounds the sending of a request to an engine that does not
	// read. 0: 30 s. A shorter HeadTimeout bounds it too. It is also how long a
	// host may acknowledge nothing until its connections are given up (without
	// Dial).
	WriteTimeout time.Duration
	// MaxHeadBytes bounds the head of an answer. 0: 64 KiB.
	MaxHeadBytes int
	// Dial replaces the network dialer: tests, Unix sockets.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

// dialer is the network's, with connections that notice when the other host has
// lost its power or its link: who only waits for an answer would hear nothing of
// it until the time-out of a slow engine.
func (o *Options) dialer() *net.Dialer {
	limit := o.WriteTimeout
	return &net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: limit / 3, Interval: limit / 6, Count: 4},
		Control: func(_, _ string, c syscall.RawConn) error {
			return giveUpAfter(c, limit)
		},
	}
}

// withDefaults returns o with every zero that means a default replaced.
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

// address is where to dial: the URL's host with the scheme's port if it names none.
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

// checkURL refuses what no call could reach.
func (o Options) checkURL() error {
	if (o.URL.Scheme != "http" && o.URL.Scheme != "https") || o.URL.Hostname() == "" {
		return errBadURL
	}
	return nil
}

// tlsConfig is the configuration of one client's connections: a copy with
// server name, protocols and a session cache, so that a burst of connections
// to one engine pays for one full handshake.
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
