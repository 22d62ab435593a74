package filter

import (
	"errors"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// reply is an answer that replaces the next handler's: a guest's local
// response, or the error that ends a stream.
type reply struct {
	status  int
	headers host.Pairs
	body    []byte
	details string
}

// newReply returns a guest's local response. It ignores the gRPC status, because no
// client of the proxy uses gRPC.
func newReply(f *filter, r *host.LocalResponse) *reply {
	p := &reply{status: int(r.Status), headers: r.Headers, body: slices.Clone(r.Body), details: r.Details}
	if p.details == "" {
		p.details = "via_wasm::" + f.p.spec.Name
	}
	return p
}

// newFailure returns an error in OpenAI's form.
func newFailure(code openai.Code, message string) *reply {
	return failureOf(openai.NewError(code, message))
}

func failureOf(e *openai.Error) *reply {
	r := &reply{status: e.Status, body: e.AppendJSON(nil), details: e.Code.String(), headers: host.Pairs{{Key: "content-type", Value: "application/json"}}}
	if e.Status == http.StatusServiceUnavailable {
		r.headers = append(r.headers, host.Pair{Key: "retry-after", Value: "1"})
	}
	return r
}

// pluginFailure returns the answer for a failed plugin without fail_open.
func pluginFailure(name string, err error) *reply {
	code, message := openai.CodePluginFailed, "the plugin "+strconv.Quote(name)+" failed"
	switch {
	case errors.Is(err, errParked):
		code, message = openai.CodePluginParked, "the plugin "+strconv.Quote(name)+" is parked: it failed too often"
	case errors.Is(err, errBusy):
		code, message = openai.CodePluginBusy, "the plugin "+strconv.Quote(name)+" is busy"
	}
	return newFailure(code, message)
}

// headerMap returns the reply's headers. The guest cannot set headers of framing.
func (r *reply) headerMap(requestID string) *headerMap {
	m := &headerMap{pseudo: host.Pairs{{Key: ":status", Value: strconv.Itoa(r.status)}}}
	for _, line := range r.headers {
		switch name := lowerName(line.Key); {
		case pseudoName(line.Key) != "", name == "content-length", name == "transfer-encoding":
		default:
			m.Add(line.Key, line.Value) // invalid lines are dropped
		}
	}
	if len(r.body) > 0 {
		m.Replace("Content-Length", strconv.Itoa(len(r.body)))
		if _, ok := m.Value("Content-Type"); !ok {
			m.Replace("Content-Type", "text/plain")
		}
	}
	if _, ok := m.Value("X-Request-Id"); !ok && requestID != "" {
		m.Replace("X-Request-Id", requestID)
	}
	return m
}

// replyTimeout is the time in which a client must read a reply over HTTP/2 or
// HTTP/3. Over HTTP/1.1 the limit of its connection applies.
const replyTimeout = time.Minute

// write sends the reply to the client without the filters.
func (r *reply) write(w http.ResponseWriter) {
	maps.Copy(w.Header(), r.headerMap("").take())
	w.WriteHeader(r.status)
	_, _ = w.Write(r.body) // an error means that the client has hung up
}

// reply sends an answer instead of the next handler's. Like any other answer it
// passes the filters that have seen the request. If an answer has already begun
// to go to the client, the reply goes directly to the client. The caller holds
// s.out.
func (s *stream) reply(r *reply) {
	w := &s.resp
	w.hops = w.hops[:0:0]
	if !w.begun {
		for i := len(s.filters) - 1; i >= 0; i-- {
			if f := &s.filters[i]; f.live() {
				w.hops = append(w.hops, hop{f: f})
			}
		}
	}
	if !bodyAllowed(r.status) {
		r.body = nil
	}
	s.details.Store(&r.details)
	w.headers, w.trailers, w.headed, w.ended = r.headerMap(s.requestHeaders.get("X-Request-Id")), nil, false, false
	s.responseHeaders.Store(w.headers)
	s.dst.wrote, s.dst.closed = true, true
	if s.r.ProtoMajor >= 2 { // a client may keep the flow-control window of its stream at 0
		s.rc().SetWriteDeadline(time.Now().Add(replyTimeout))
	}
	if w.begin(len(r.body) == 0); len(r.body) > 0 && !s.interrupted() {
		w.dataFrom(0, r.body, true)
	}
}

// bodyAllowed reports whether an answer of that status has a body (RFC 9110 6.4.1).
func bodyAllowed(status int) bool {
	return status >= 200 && status != http.StatusNoContent && status != http.StatusNotModified
}
