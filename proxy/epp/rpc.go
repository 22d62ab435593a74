package epp

import (
	"io"
	"net/http"
	"strconv"

	"google.golang.org/grpc/codes"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/epp/vllmgrpc"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// rpc is a request of a gRPC client. If method is not 0, the exchange sees the HTTP request that asks
// for the same, and an answer to this request. Engine and client get the messages as they are.
type rpc struct {
	method vllmgrpc.Method
	raw    *buffer.Buffer // the body; nil: it has not come, or is released
	form   *buffer.Buffer // the body that the exchange reads; nil: as raw
	stream bool           // the request asks for a stream
	answer vllmgrpc.Answer
	events []byte // that Next has returned
}

// call makes r, with the path of the client, the HTTP request that asks for the same.
func (st *stream) call(r *http.Request, path string) {
	if !vllmgrpc.IsGRPC(r.Header.Get("Content-Type")) {
		return
	}
	st.rpc = new(rpc)
	if m := vllmgrpc.MethodOf(path); m != 0 && r.Method == http.MethodPost {
		st.rpc.method = m
		r.URL.Path, r.URL.RawPath = st.rpc.method.API().Path(), ""
		r.Body = &callBody{st: st, from: r.Body}
		r.ContentLength = -1
	}
}

// reads reports whether the exchange sees another request and another answer than engine and client.
func (c *rpc) reads() bool { return c != nil && c.method != 0 }

// end frees the body.
func (c *rpc) end() {
	if c != nil {
		c.raw.Free()
		c.form.Free()
		c.raw, c.form = nil, nil
	}
}

// within keeps a call to engines that compute prompt and answer: a sidecar makes no two legs of it.
func (c *rpc) within(list []*engine.Instance) []*engine.Instance {
	if c.reads() {
		return []*engine.Instance{}
	}
	return list
}

// callBody is the body of a call as the exchange sees it.
type callBody struct {
	st     *stream
	from   io.ReadCloser
	rest   []byte // of the form
	failed error  // io.EOF: the form is made
}

// Read implements io.Reader.
func (b *callBody) Read(p []byte) (int, error) {
	if b.failed == nil {
		if b.failed = b.convert(); b.failed == nil {
			b.failed = io.EOF
		}
	}
	if len(b.rest) > 0 {
		n := copy(p, b.rest)
		b.rest = b.rest[n:]
		return n, nil
	}
	b.st.rpc.form.Free() // the request has a copy
	b.st.rpc.form = nil
	return 0, b.failed
}

// Close implements io.Closer.
func (b *callBody) Close() error { return b.from.Close() }

// convert reads the body of the gateway.
func (b *callBody) convert() error {
	o, c := &b.st.server.options, b.st.rpc
	raw, err := o.Memory.Get(buffer.FirstRead)
	if err != nil {
		return downstream.ErrMemory
	}
	c.raw = raw
	for {
		n, err := b.from.Read(raw.B[len(raw.B):cap(raw.B)])
		if raw.B = raw.B[:len(raw.B)+n]; len(raw.B) > o.MaxBody {
			return openai.NewError(openai.CodeBodyTooLarge, "the message is larger than server.max_body")
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if len(raw.B) == cap(raw.B) && raw.Grow(0, o.MaxBody+1) != nil {
			return downstream.ErrMemory
		}
	}
	const wordy = 4 // a token id takes 1 to 3 bytes in the message, and up to 7 in the form
	if c.form, err = o.Memory.Get(wordy * len(raw.B)); err != nil {
		return downstream.ErrMemory
	}
	text, stream, err := c.method.AppendBody(c.form.B[:0], raw.B, o.TrustPD())
	if err != nil {
		return err
	}
	c.form.Set(text)
	c.stream, b.rest = stream, text
	return nil
}

// head reads the head of the answer to a call. It returns the HTTP status, and whether the answer is
// a stream for the exchange.
func (c *rpc) head(m *incoming) (status int, events bool) {
	c.answer.Reset(c.method, c.stream)
	if failed := grpcStatus(m, 0); failed != 0 {
		return vllmgrpc.HTTPStatus(failed), false
	}
	return http.StatusOK, c.stream
}

// next returns the part of the answer to a call that the exchange sees.
func (c *rpc) next(m *incoming) []byte {
	c.events = c.answer.Feed(c.events[:0], m.body)
	switch {
	case m.of == fieldResponseTrailers:
		c.events = c.answer.End(c.events, grpcStatus(m, int(codes.Unknown)))
	case m.over: // without trailers, no gRPC answer is whole
		c.events = c.answer.End(c.events, int(codes.Unknown))
	}
	return c.events
}

// grpcStatus returns the gRPC status in a header or in trailers; absent if there is none.
func grpcStatus(m *incoming, absent int) int {
	for _, l := range m.lines {
		if l.name == "grpc-status" {
			if n, err := strconv.ParseUint(l.value, 10, 16); err == nil {
				return int(n)
			}
			return int(codes.Unknown)
		}
	}
	return absent
}

// refusal turns the reply into the answer for a client of gRPC: the text of the error alone. Envoy
// makes a gRPC answer of it.
func (st *stream) refusal() message {
	text, _ := openai.Find(st.reply.body, "error", "message")
	reason, _ := openai.String(text)
	code := vllmgrpc.Status(st.reply.status)
	if text, ok := openai.Find(st.reply.body, "error", "code"); ok && string(text) == strconv.Quote(openai.CodeNotFound.String()) {
		code = codes.Unimplemented // there is no such method
	}
	st.reply.header.Del("Content-Type")
	return immediate(st.reply.status, st.reply.header, []byte(reason), &code)
}
