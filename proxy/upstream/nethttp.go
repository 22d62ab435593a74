package upstream

import (
	"bytes"
	"context"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// netHTTPClient is http.Transport as a Client.
type netHTTPClient struct {
	opt       Options
	bad       error
	transport *http.Transport
	calls     callList

	open, busy             atomic.Int64 // number of open connections; number of calls that hold a connection
	dials, reuses, retries atomic.Uint64
}

// NewNetHTTP returns a Client on net/http's Transport: HTTP/1.1, and HTTP/2 if an https
// engine offers it. It differs from New in these points.
//
//   - Header names are sent in canonical form and sorted order.
//   - Its parser is laxer: Transfer-Encoding takes precedence over Content-Length, folded lines are
//     joined, unknown transfer codings of HTTP/1.0 are ignored. Response.Header lacks
//     the framing lines and is ordered by name.
//   - A retry may use another dead idle connection and is then repeated; each
//     repetition uses up one of them. A request without body is retried however late
//     its connection was lost. A request of more than 16 KiB is not retried once its
//     first part was written.
//   - The body is copied before it is sent. If sending fails after an engine has
//     rejected the request early, the engine's answer may be lost.
//   - A dial whose call has ended goes on in the background until DialTimeout, and its
//     connection stays in the pool. Stats.Idle and Waiting are estimates, and
//     meaningless over HTTP/2.
//   - Bytes after an answer end the connection too, but later, and the transport writes
//     the first of them to the standard logger.
//   - DialTimeout bounds the connect and the TLS handshake separately.
//   - A write in progress at SendBy is not interrupted. A request that is not sent
//     because of SendBy counts as sent if it had a connection.
//   - Each connection needs two goroutines and their memory.
func NewNetHTTP(o Options) Client {
	o = o.withDefaults()
	c := &netHTTPClient{opt: o, bad: o.checkURL(), calls: newCallList()}
	c.transport = &http.Transport{
		DialContext:            c.dial,
		TLSHandshakeTimeout:    o.DialTimeout,
		MaxConnsPerHost:        o.MaxConns,
		MaxIdleConnsPerHost:    o.MaxIdle,
		IdleConnTimeout:        o.IdleTimeout,
		MaxResponseHeaderBytes: int64(o.MaxHeadBytes),
		DisableCompression:     true,
		WriteBufferSize:        16 << 10, // most requests fit into one write
		Protocols:              new(http.Protocols),
	}
	c.transport.Protocols.SetHTTP1(true)
	if o.secure() {
		c.transport.TLSClientConfig = o.tlsConfig()
		c.transport.Protocols.SetHTTP2(true)
	}
	return c
}

// CloseIdle implements Client.
func (cl *netHTTPClient) CloseIdle() { cl.transport.CloseIdleConnections() }

// Stats implements Client.
func (cl *netHTTPClient) Stats() Stats {
	open := int(cl.open.Load())
	return Stats{
		Open:    open,
		Idle:    max(0, open-int(cl.busy.Load())),
		Dials:   cl.dials.Load(),
		Reuses:  cl.reuses.Load(),
		Retries: cl.retries.Load(),
	}
}

// dialKey is the context key under which a dial finds its call.
type dialKey struct{}

func (cl *netHTTPClient) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	cl.dials.Add(1)
	if call, ok := ctx.Value(dialKey{}).(*netHTTPCall); ok {
		call.dialBegins()
	}
	ctx, cancel := context.WithTimeout(ctx, cl.opt.DialTimeout)
	defer cancel()
	nc, err := cl.opt.Dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	cl.open.Add(1)
	return &netHTTPConn{Conn: nc, client: cl}, nil
}

// netHTTPConn counts open connections and bounds each write.
type netHTTPConn struct {
	net.Conn
	client *netHTTPClient
	closed atomic.Bool
	unsent atomic.Bool // a write is in progress or has failed
}

func (c *netHTTPConn) Write(p []byte) (int, error) {
	c.SetWriteDeadline(time.Now().Add(c.client.opt.WriteTimeout))
	c.unsent.Store(true)
	n, err := c.Conn.Write(p)
	c.unsent.Store(err != nil)
	return n, err
}

func (c *netHTTPConn) Close() error {
	if !c.closed.Swap(true) {
		c.client.open.Add(-1)
	}
	return c.Conn.Close()
}

// Do implements Client.
func (cl *netHTTPClient) Do(ctx context.Context, req *Request) (*Response, error) {
	if err := req.check(); err != nil {
		return nil, &Error{Op: OpWrite, Err: err}
	}
	if cl.bad != nil {
		return nil, &Error{Op: OpDial, Err: cl.bad}
	}
	if ctx.Err() != nil {
		err := contextError(ctx)
		return nil, &Error{Op: OpDial, Timeout: isTimeout(err), Err: err}
	}
	target, err := cl.target(req.Path)
	if err != nil {
		return nil, &Error{Op: OpWrite, Err: err}
	}
	c := newNetHTTPCall(cl, ctx, req)
	answer, err := cl.transport.RoundTrip(c.request(req, target))
	if err == nil && answer.StatusCode == http.StatusSwitchingProtocols {
		answer.Body.Close()
		err = errSwitched
	}
	if err == nil && !c.begin(answer.Body) {
		answer.Body.Close()
		err = context.Canceled // fail finds the cause
	}
	if err != nil {
		return nil, c.fail(&Error{Op: c.failedOp(), Err: err})
	}
	if answer.Body == http.NoBody {
		c.end()
		c.err = io.EOF
	}
	return c.response(answer), nil
}

// request translates req for the transport. The body is copied, because the transport may read it
// after RoundTrip has returned. It has a type that the transport supports, because the transport
// sends the head alone first for other types.
func (c *netHTTPCall) request(req *Request, target *url.URL) *http.Request {
	body := bytes.Join(req.Body, nil)
	header := make(http.Header, len(req.Header)+2)
	for i := range req.Header {
		if f := &req.Header[i]; !ownField(f.Name) {
			header.Add(f.Name, f.Value)
		}
	}
	if header["User-Agent"] == nil {
		header["User-Agent"] = []string{} // otherwise the transport sends its own
	}
	if header["Idempotency-Key"] == nil && !req.Once {
		header["Idempotency-Key"] = []string{} // not sent; permits the retry of any method
	}
	r := &http.Request{
		Method: req.method(), URL: target, Host: c.client.opt.URL.Host,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: header, ContentLength: int64(len(body)),
	}
	if len(body) > 0 {
		r.Body = io.NopCloser(bytes.NewReader(body))
		r.GetBody = func() (io.ReadCloser, error) {
			if !c.mayRetry() {
				return nil, errLostReused
			}
			return io.NopCloser(bytes.NewReader(body)), nil
		}
	}
	ctx := context.WithValue(c.inner, dialKey{}, c)
	return r.WithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GetConn:              c.getConn,
		GotConn:              c.gotConn,
		WroteRequest:         c.wroteRequest,
		GotFirstResponseByte: c.answerBegins,
	}))
}

// target returns the URL of path with which the transport sends path unchanged.
func (cl *netHTTPClient) target(path string) (*url.URL, error) {
	if !strings.HasPrefix(path, "//") { // Opaque would take it for a host
		return &url.URL{Scheme: cl.opt.URL.Scheme, Host: cl.opt.URL.Host, Opaque: path}, nil
	}
	u, err := url.ParseRequestURI(path)
	if err != nil {
		return nil, errBadPath
	}
	u.Scheme, u.Host = cl.opt.URL.Scheme, cl.opt.URL.Host
	return u, nil
}

// response converts the transport's answer.
func (c *netHTTPCall) response(answer *http.Response) *Response {
	r := &Response{Status: answer.StatusCode, ContentLength: answer.ContentLength, body: c}
	r.Header = make([]Field, 0, len(answer.Header))
	for _, name := range slices.Sorted(maps.Keys(answer.Header)) {
		for _, value := range answer.Header[name] {
			r.Header = append(r.Header, Field{Name: name, Value: value})
		}
	}
	return r
}
