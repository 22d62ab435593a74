package websocket

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	ws "github.com/coder/websocket"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// turn is one message that asks for a response.
type turn struct {
	body downstream.Client // has the message, and counts its memory
	over atomic.Bool       // the response has ended, or its last event has been sent
}

// receive reads a message. It returns nil if the message was refused, and how the WebSocket ends
// if no further message can be read.
func (s *session) receive(kind ws.MessageType, message io.Reader) (*turn, ending) {
	if kind != ws.MessageText {
		s.fail(openai.NewError(openai.CodeUnsupportedMessage, reasonBinary))
		return nil, ending{ws.StatusUnsupportedData, reasonBinary}
	}
	t := new(turn)
	err := s.readBody(t, message)
	if err != nil {
		t.body.Close()
		s.fail(asError(err))
		_ = s.conn.SetReadDeadline(time.Time{}) // for the client's close frame
		return nil, ending{closeCode(asError(err)), reasonRefused}
	}
	if !utf8.Valid(t.body.Body()) { // RFC 6455, 8.1
		t.body.Close()
		return nil, ending{ws.StatusInvalidFramePayloadData, reasonText}
	}
	if err := t.edit(); err != nil {
		t.body.Close()
		s.fail(asError(err))
		return nil, ending{}
	}
	return t, ending{}
}

// closeCode returns the code with which a WebSocket ends after the error e.
func closeCode(e *openai.Error) ws.StatusCode {
	switch e.Status {
	case http.StatusRequestEntityTooLarge:
		return ws.StatusMessageTooBig
	case http.StatusServiceUnavailable, http.StatusTooManyRequests:
		return ws.StatusTryAgainLater
	}
	return ws.StatusPolicyViolation
}

// readBody reads a message with the limits of request bodies.
func (s *session) readBody(t *turn, message io.Reader) (err error) {
	r := s.request.WithContext(s.ctx)
	r.Body, r.ContentLength = io.NopCloser(message), -1
	r.Header = http.Header{}            // the lines of the handshake say nothing about the message
	r.Proto, r.ProtoMajor = "HTTP/2", 2 // a message that was not read to its end needs no care of HTTP/1.1
	s.bridge.bodies.Limit(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		cfg := s.bridge.config()
		downstream.LimitBody(r, time.Duration(cfg.Server.ReadTimeout))
		t.body.Open(s.bridge.bodies, cfg, w, r)
		err = t.body.ReadBody(s.client)
	})).ServeHTTP(deadlines{s}, r)
	return err
}

// edit checks a message and turns it into the body of a request.
func (t *turn) edit() error {
	o := openai.Object{Memory: &t.body}
	if err := o.Parse(t.body.Body()); err != nil {
		return err
	}
	if n := o.Size(); n > downstream.MinDerived {
		if err := t.body.Derive(n); err != nil {
			return err
		}
	}
	raw, _ := o.Get("type")
	if kind, _ := openai.String(raw); kind != "response.create" {
		return openai.NewFieldError(openai.CodeUnsupportedMessage, "type", "the type of a message must be response.create")
	}
	for _, f := range []struct{ name, harmless string }{{"background", "false"}, {"generate", "true"}, {"stream_id", "null"}} {
		if v, ok := o.Get(f.name); ok && !openai.IsNull(v) && string(v) != f.harmless {
			return openai.NewFieldError(openai.CodeUnsupportedMessage, f.name, "WebSockets of this server do not support '"+f.name+"'")
		}
	}
	edits := []openai.Edit{{Key: "type", Remove: true}, {Key: "generate", Remove: true}, {Key: "stream_id", Remove: true}, {Key: "stream", Value: []byte("true")}}
	return t.body.RewriteBody(len(o.Raw())+len(`"stream":true,`), func(dst []byte) []byte { return o.Append(dst, edits...) })
}

// request returns the request of the turn, the nth of the WebSocket that opened opened.
func (t *turn) request(ctx context.Context, opened *http.Request, nth int) *http.Request {
	h := maps.Clone(opened.Header)
	for name := range h {
		if strings.HasPrefix(name, "Sec-Websocket-") {
			delete(h, name)
		}
	}
	for _, line := range opened.Header["Connection"] {
		for name := range strings.SplitSeq(line, ",") { // lines of this connection alone
			h.Del(strings.TrimSpace(name))
		}
	}
	for _, name := range []string{"Connection", "Upgrade", "Origin", "Content-Encoding", "Accept-Encoding", "Expect"} {
		delete(h, name)
	}
	h["Content-Type"] = []string{"application/json"}
	if id := h.Get("X-Request-Id"); id != "" { // the requests of a client have different ids
		h["X-Request-Id"] = []string{id + "-" + strconv.Itoa(nth)}
	}
	r := (&http.Request{
		Method: http.MethodPost, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		URL:  &url.URL{Path: opened.URL.Path, RawQuery: opened.URL.RawQuery},
		Host: opened.Host, RemoteAddr: opened.RemoteAddr, TLS: opened.TLS, Header: h,
		ContentLength: int64(len(t.body.Body())), RequestURI: opened.RequestURI,
	}).WithContext(ctx)
	r.Body = &messageBody{Reader: bytes.NewReader(t.body.Body()), turn: t}
	return r
}

// messageBody is the body of a turn's request. It frees the message when all of it was read.
type messageBody struct {
	*bytes.Reader
	turn *turn // nil: the message is free
}

// Read implements io.Reader.
func (b *messageBody) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if err == io.EOF && b.turn != nil {
		b.Reader.Reset(nil)
		b.turn.body.ReleaseBody()
		b.turn = nil
	}
	return n, err
}

// Close implements io.Closer.
func (*messageBody) Close() error { return nil }

// deadlines is the http.ResponseWriter beside a message that is being read. It only sets
// deadlines.
type deadlines struct{ s *session }

// Header implements http.ResponseWriter.
func (deadlines) Header() http.Header { return http.Header{} }

// WriteHeader implements http.ResponseWriter.
func (deadlines) WriteHeader(int) {}

// Write implements http.ResponseWriter.
func (deadlines) Write([]byte) (int, error) { return 0, errors.ErrUnsupported }

// SetReadDeadline is for http.ResponseController.
func (d deadlines) SetReadDeadline(t time.Time) error { return d.s.conn.SetReadDeadline(t) }
