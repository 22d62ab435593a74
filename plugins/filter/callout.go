package filter

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
)

const (
	// maxCalls is how many HTTP calls of a plugin may be under way.
	maxCalls = 1024
	// maxCallAnswer is the largest answer to an HTTP call, in bytes; a larger one
	// is a failure.
	maxCallAnswer = 4 << 20
	// defaultCallTimeout is for calls that name none.
	defaultCallTimeout = 10 * time.Second
)

// HTTPCall implements host.Env. BadArgument: the upstream is unknown or not
// allowed, or a line of the head cannot be sent. InternalFailure: too many calls
// are under way.
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
	req, err := newCallRequest(base, call)
	if err != nil {
		return 0, host.BadArgument
	}
	if p.calls.Add(1) > maxCalls {
		p.calls.Add(-1)
		return 0, host.InternalFailure
	}
	v.mu.Lock()
	v.lastCall++
	if v.lastCall == 0 {
		v.lastCall = 1
	}
	token := v.lastCall
	v.mu.Unlock()
	if !p.spawn(func() { v.exchange(root, token, req, timeout) }) {
		p.calls.Add(-1)
		return 0, host.InternalFailure
	}
	return token, host.OK
}

// newCallRequest makes a call's request. Framing is the host's to write, and an
// empty :authority means the upstream's own host.
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
	ref, err := url.ParseRequestURI(path) // which takes "//host" for a path, too
	if err != nil {
		return nil, err
	}
	target := *base
	target.Path = strings.TrimSuffix(base.Path, "/") + ref.Path
	target.RawPath = strings.TrimSuffix(base.EscapedPath(), "/") + ref.EscapedPath()
	target.RawQuery, target.Fragment = ref.RawQuery, ""
	req, err := http.NewRequest(method, target.String(), bytes.NewReader(call.Body))
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
		header["User-Agent"] = nil // none, rather than net/http's
	}
	if len(call.Trailers) > 0 {
		req.Trailer = make(http.Header)
		req.ContentLength = -1 // trailers need chunks
		for _, line := range call.Trailers {
			if !validName(line.Key) || !validValue(line.Value) {
				return nil, errBadLine
			}
			req.Trailer.Add(line.Key, line.Value)
		}
	}
	return req, nil
}

// exchange does one HTTP call and hands its answer to the guest, also when the
// stream that asked is over: exactly one callback for each token, unless the VM
// is gone.
func (v *vm) exchange(root, token uint32, req *http.Request, timeout time.Duration) {
	defer v.p.calls.Add(-1)
	ctx, cancel := context.WithTimeout(v.p.ctx, timeout)
	defer cancel()
	headers, body, trailers := v.p.roundTrip(req.WithContext(ctx))
	_ = v.callRoot(host.OnHTTPCallResponse, func(ctx context.Context) error {
		return v.guest.HTTPCallResponse(ctx, root, token, headers, body, trailers)
	})
}

// roundTrip sends a call and reads its answer whole; no headers mean that it
// failed.
func (p *Plugin) roundTrip(req *http.Request) (headers host.Pairs, body []byte, trailers host.Pairs) {
	transport := p.deps.Transport
	if transport == nil {
		transport = http.DefaultTransport
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		p.deps.Log.Debug("call to upstream failed", "upstream", req.URL.Host, "error", err)
		return nil, nil, nil
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(io.LimitReader(resp.Body, maxCallAnswer+1))
	if err != nil || len(body) > maxCallAnswer {
		p.deps.Log.Debug("answer of upstream failed", "upstream", req.URL.Host, "bytes", len(body), "error", err)
		return nil, nil, nil
	}
	answer := headerMap{
		pseudo: host.Pairs{{Key: ":status", Value: strconv.Itoa(resp.StatusCode)}},
		lines:  resp.Header,
	}
	trailer := headerMap{lines: resp.Trailer}
	return answer.Pairs(), body, trailer.Pairs()
}
