package epp

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/pdproxy/pdproxy/proxy/epp/grpcserver"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/sidecar/extproc"
)

// clientRequest has the facts of the client's request that the answer to the gateway needs.
type clientRequest struct {
	header  http.Header // without the lines of own
	path    string      // with the query
	prefix  string      // of path: the part before the endpoint, which the gateway removes later
	own     []string    // header lines of the client with names of the picker
	subset  []string    // allowed endpoints
	limited bool        // only those of subset are allowed
}

// ownLine reports whether the picker itself sets a header line of that name in lower case, for
// the gateway and the sidecars. Such lines of clients are removed. Some servers read an underscore as a hyphen.
func ownLine(name string) bool {
	name = strings.ReplaceAll(name, "_", "-")
	return strings.HasPrefix(name, extproc.HeaderDestination) || name == extproc.HeaderPrefill || name == extproc.HeaderEncoders
}

// request returns the client's request. The error is the answer for the client.
func (st *stream) request(first *incoming) (*http.Request, *openai.Error) {
	r := &http.Request{Proto: "HTTP/2.0", ProtoMajor: 2, Header: make(http.Header, len(first.lines)), ContentLength: -1}
	values := make([]string, 0, len(first.lines)) // memory of the values of r.Header
	for _, l := range first.lines {
		switch l.name {
		case ":method":
			r.Method = l.value
		case ":path":
			st.client.path = l.value
		case ":authority":
			r.Host = l.value
		default:
			if strings.HasPrefix(l.name, ":") {
				continue
			}
			if ownLine(l.name) {
				st.client.own = append(st.client.own, l.name)
				continue
			}
			key := http.CanonicalHeaderKey(l.name)
			if before := r.Header[key]; before != nil {
				r.Header[key] = append(before, l.value)
				continue
			}
			values = append(values, l.value)
			r.Header[key] = values[len(values)-1 : len(values) : len(values)]
		}
	}
	st.client.header, st.space = r.Header, st.server.options.Metadata()
	st.client.subset, st.client.limited = subsetOf(first.subset)
	var err error
	if r.URL, err = url.ParseRequestURI(st.client.path); err != nil {
		return nil, openai.NewError(openai.CodeNotFound, "the path of the request is malformed")
	}
	r.RequestURI = st.client.path
	whole, _, _ := strings.Cut(st.client.path, "?")
	if st.client.prefix = st.server.options.Prefix(whole); st.client.prefix != "" {
		r.URL.Path, r.URL.RawPath = whole[len(st.client.prefix):], ""
	}
	if n, err := strconv.ParseInt(r.Header.Get("Content-Length"), 10, 64); err == nil && n >= 0 {
		r.ContentLength = n
	}
	r.RemoteAddr = st.grpc.RemoteAddr()
	st.bodied = !first.over
	if r.Body = (&body{st: st}); first.over {
		r.Body, r.ContentLength, st.bodyOver = http.NoBody, 0, true
	}
	st.call(r, whole)
	return r.WithContext(st.ctx), nil
}

// subsetOf reads the endpoints to which the gateway limits the choice: a list of texts, or one
// text with commas.
func subsetOf(v *structpb.Value) (list []string, limited bool) {
	if v == nil {
		return nil, false
	}
	texts := v.GetListValue().GetValues()
	if texts == nil {
		texts = []*structpb.Value{v}
	}
	for _, text := range texts {
		for one := range strings.SplitSeq(text.GetStringValue(), ",") {
			if one = strings.TrimSpace(one); one != "" {
				list = append(list, one)
			}
		}
	}
	return list, true
}

// body is the request's body as the gateway sends it.
type body struct {
	st     *stream
	from   *incoming // has rest
	rest   []byte
	begun  bool
	failed error
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	for len(b.rest) == 0 {
		if b.st.bodyOver {
			b.from.release() // the answer may last much longer
			b.from = nil
			return 0, io.EOF
		}
		if b.failed == nil {
			b.failed = b.receive()
		}
		if b.failed != nil {
			return 0, b.failed
		}
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

// receive waits for the next part of the body.
func (b *body) receive() error {
	st := b.st
	if !b.begun {
		b.begun = true
		if err := st.askForBody(); err != nil {
			return err
		}
	}
	b.from.release()
	b.from = nil
	m, err := st.nextOfBody()
	if err != nil {
		return err
	}
	switch {
	case m.of == fieldRequestTrailers:
		st.bodyOver, st.trailers = true, true
	case m.of != fieldRequestBody:
		return io.ErrUnexpectedEOF
	default:
		b.from, b.rest, st.bodyOver = m, m.body, m.over
		if st.requestMode == filter.ProcessingMode_BUFFERED_PARTIAL && !st.bodyOver {
			return errPartial
		}
		st.bodyOver = st.bodyOver || st.requestMode == filter.ProcessingMode_BUFFERED // trailers follow
	}
	return nil
}

// errPartial is the answer to a request whose body exceeds the gateway's buffer.
var errPartial = openai.NewError(openai.CodeBodyTooLarge, "the request body is larger than the buffer of the gateway")

// askForBody makes a gateway that buffers send the body: it waits for the answer to the header
// first.
func (st *stream) askForBody() error {
	if st.requestMode == filter.ProcessingMode_FULL_DUPLEX_STREAMED {
		return nil
	}
	return st.send(false, carryOn(fieldRequestHeaders))
}

// send sends a message to the gateway. more: another message follows at once, or the end of the
// stream, or a wait for a message. The error is the cause of the context's end.
func (st *stream) send(more bool, m message) error { return st.sendPart(more, outgoing{head: m}) }

// sendPart is send for a message in pieces.
func (st *stream) sendPart(more bool, o outgoing) error {
	if err := st.grpc.Send(more, grpcserver.Parts{o.head, o.data, o.tail}); err != nil {
		st.grpc.Cancel(context.Canceled)
		return context.Cause(st.ctx)
	}
	return nil
}

// Close implements io.Closer.
func (b *body) Close() error { return nil }
