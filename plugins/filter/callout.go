package filter

import (
	"bytes"
	"context"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
)

const (
	// maxCallAnswer is the largest answer to an HTTP call, in bytes. A call
	// with a larger answer fails.
	maxCallAnswer = 4 << 20
	// callCost is the cost of an HTTP call in bytes, in addition to the data
	// that it sends and receives: a connection, a goroutine, and the head of an
	// answer before it is read.
	callCost = 32 << 10
	// defaultCallTimeout is the timeout of calls that set none.
	defaultCallTimeout = 10 * time.Second
)

// HTTPCall implements host.Env. BadArgument: the upstream is unknown or not
// allowed, or a line of the head cannot be sent. InternalFailure: too many
// calls are running, or the plugin's budget is too small.
func (v *vm) HTTPCall(root uint32, call *host.HTTPCall) (uint32, host.Status) {
	p := v.p
	base := p.deps.Upstreams[call.Upstream]
	if base == nil || !p.allowAll && !p.allowed[call.Upstream] {
		return 0, host.BadArgument
	}
	timeout := call.Timeout
	if timeout == 0 {
		timeout = defaultCallTimeout
	}
	size := callCost + int64(len(call.Body)) + sizeOf(call.Headers).cost() + sizeOf(call.Trailers).cost()
	if !p.deps.Host.BeginCall() {
		return 0, host.InternalFailure
	}
	if !p.deps.Host.Take(size) {
		p.deps.Host.EndCall()
		return 0, host.InternalFailure
	}
	drop := func() {
		p.deps.Host.Give(size)
		p.deps.Host.EndCall()
	}
	req, err := newCallRequest(base, call)
	if err != nil {
		drop()
		return 0, host.BadArgument
	}
	v.mu.Lock()
	v.lastCall++
	if v.lastCall == 0 {
		v.lastCall = 1
	}
	token := v.lastCall
	v.mu.Unlock()
	if !p.spawn(func() { v.exchange(root, token, req, size, timeout) }) {
		drop()
		return 0, host.InternalFailure
	}
	return token, host.OK
}

// newCallRequest makes a call's request. The host writes the headers of
// framing. An empty :authority means the upstream's own host.
func newCallRequest(base *url.URL, call *host.HTTPCall) (*http.Request, error) {
	var method, path, authority string
	header := make(http.Header)
	for _, line := range call.Headers {
		switch key := strings.ToLower(line.Key); key {
		case ":method":
			method = line.Value
		case ":path":
			path = line.Value
		case ":authority":
			authority = line.Value
		case ":scheme", "host", "content-length", "transfer-encoding", "connection":
		default:
			if !validName(line.Key) || !validValue(line.Value) {
				return nil, errBadLine
			}
			header.Add(line.Key, line.Value)
		}
	}
	if !strings.HasPrefix(path, "/") {
		path = "/" + path
	}
	ref, err := url.ParseRequestURI(path) // which also parses "//host" as a path
	if err != nil {
		return nil, err
	}
	target := *base
	target.Path = strings.TrimSuffix(base.Path, "/") + ref.Path
	target.RawPath = strings.TrimSuffix(base.EscapedPath(), "/") + ref.EscapedPath()
	target.RawQuery, target.Fragment = ref.RawQuery, ""
	req, err := http.NewRequest(method, target.String(), bytes.NewReader(slices.Clone(call.Body)))
	if err != nil {
		return nil, err
	}
	if authority != "" {
		if !validValue(authority) {
			return nil, errBadLine
		}
		req.Host = authority
	}
	req.Header = header
	if header.Get("User-Agent") == "" {
		header["User-Agent"] = nil // no header, instead of net/http's default
	}
	if len(call.Trailers) > 0 {
		req.Trailer = make(http.Header)
		req.ContentLength = -1 // trailers need chunked encoding
		for _, line := range call.Trailers {
			if !validName(line.Key) || !validValue(line.Value) {
				return nil, errBadLine
			}
			req.Trailer.Add(line.Key, line.Value)
		}
	}
	return req, nil
}

// exchange makes one HTTP call and passes the answer to the guest, even if the calling
// stream has ended. Each token gets exactly one callback, unless the VM was lost. size is
// the number of bytes that the budget holds for the call.
func (v *vm) exchange(root, token uint32, req *http.Request, size int64, timeout time.Duration) {
	budget := v.p.deps.Host
	defer budget.EndCall()
	ctx, cancel := context.WithTimeout(v.p.ctx, timeout)
	defer cancel()
	a := v.p.roundTrip(req.WithContext(ctx))
	budget.Give(size) // the sent data is no longer in memory
	defer budget.Give(a.held)
	_ = v.callRoot(host.OnHTTPCallResponse, func(ctx context.Context) error {
		return v.guest.HTTPCallResponse(ctx, root, token, a.headers, a.body, a.trailers)
	})
}

// callAnswer is the answer to an HTTP call. Empty headers mean that the call
// failed.
type callAnswer struct {
	headers  host.Pairs
	body     []byte
	trailers host.Pairs
	held     int64 // its bytes that count in the plugin's budget
}

// roundTrip sends a call and reads its whole answer.
func (p *Plugin) roundTrip(req *http.Request) (a callAnswer) {
	transport := p.deps.Transport
	if transport == nil {
		transport = http.DefaultTransport
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		p.deps.Log.Debug("call to upstream failed", "upstream", req.URL.Host, "error", err)
		return a
	}
	defer resp.Body.Close()
	fail := func(err error) callAnswer {
		p.deps.Log.Debug("answer of upstream failed", "upstream", req.URL.Host, "bytes", len(a.body), "error", err)
		p.deps.Host.Give(a.held)
		return callAnswer{}
	}
	head := headerMap{
		pseudo: host.Pairs{{Key: ":status", Value: strconv.Itoa(resp.StatusCode)}},
		lines:  resp.Header,
	}
	if a.headers = head.Pairs(); !p.take(&a, sizeOf(a.headers).cost()) {
		return fail(errNoRoom)
	}
	a.body, err = readHeld(p.deps.Host, resp.Body, maxCallAnswer)
	a.held += int64(cap(a.body))
	if err != nil {
		return fail(err)
	}
	trailer := headerMap{lines: resp.Trailer}
	if a.trailers = trailer.Pairs(); !p.take(&a, sizeOf(a.trailers).cost()) {
		return fail(errNoRoom)
	}
	return a
}

// take counts n more bytes of an answer. It returns false when the plugin's
// budget is too small.
func (p *Plugin) take(a *callAnswer, n int64) bool {
	if !p.deps.Host.Take(n) {
		return false
	}
	a.held += n
	return true
}
