// Package websocket serves the Responses API over WebSockets. Each message of a client is one
// ordinary request: it runs through the same handler as a POST, and the events of the answer
// become messages.
//
// The protocol is OpenAI's WebSocket mode: the client sends {"type":"response.create",…} with the
// members of a request body, one response at a time. The server sends the data of each event as
// one text message, and errors as {"type":"error","status":…,"error":{…}}.
//
// The decisions behind this package are in docs/design/edge.md.
package websocket

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"time"

	ws "github.com/coder/websocket"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Bridge opens WebSockets. Safe for concurrent use.
type Bridge struct {
	config  func() *config.Config
	bodies  *downstream.Bodies
	handler http.Handler
}

// New returns a bridge whose requests go to handler. Messages have the limits of bodies.
func New(config func() *config.Config, bodies *downstream.Bodies, handler http.Handler) *Bridge {
	return &Bridge{config: config, bodies: bodies, handler: handler}
}

// Takes reports whether the bridge can open a WebSocket for the client of r: only HTTP/1.1
// connections can become one. Codex relies on data that OpenAI's servers keep with a connection:
// with `generate: false` it sends the beginning of a prompt before the prompt, and later messages
// continue responses that no engine has stored. The proxy keeps no such data.
func Takes(r *http.Request) bool {
	return r.ProtoMajor == 1 && r.ProtoAtLeast(1, 1) && !strings.Contains(strings.Join(r.Header["Openai-Beta"], ","), "responses_websockets")
}

// Serve turns the connection of r into a WebSocket and serves its messages until it ends. The
// caller has checked the client's key and origin. client is the client's name for limits.
func (b *Bridge) Serve(w http.ResponseWriter, r *http.Request, client string) {
	leaving := downstream.Leaving(r.Context())
	select {
	case <-leaving:
		downstream.Error(w, downstream.Draining)
		return
	default:
	}
	if r.ContentLength != 0 {
		downstream.Error(w, openai.NewError(openai.CodeUnsupportedMessage, "a request that opens a WebSocket has no body"))
		return
	}
	h := handshake{ResponseWriter: w}
	conn, err := ws.Accept(&h, r, &ws.AcceptOptions{InsecureSkipVerify: true}) // the caller has checked the origin
	if err != nil {
		h.refuse()
		return
	}
	conn.SetReadLimit(-1) // the limits of bodies apply
	ctx, cancel := context.WithCancel(r.Context())
	s := &session{
		bridge: b, ws: conn, conn: h.conn, request: r, ctx: ctx, cancel: cancel, client: client,
		turns: make(chan *turn, 2), gone: make(chan struct{}), quiet: make(chan struct{}, 1),
	}
	s.run(leaving)
}

// handshake is the http.ResponseWriter of ws.Accept. It keeps the connection, and holds back an
// error, whose text has not OpenAI's form.
type handshake struct {
	http.ResponseWriter
	conn   net.Conn
	failed bool
	text   string
}

// WriteHeader implements http.ResponseWriter.
func (h *handshake) WriteHeader(status int) {
	if h.failed = status != http.StatusSwitchingProtocols; !h.failed {
		h.ResponseWriter.WriteHeader(status)
	}
}

// Write implements http.ResponseWriter.
func (h *handshake) Write(p []byte) (int, error) {
	h.text += string(p)
	return len(p), nil
}

// Hijack implements http.Hijacker.
func (h *handshake) Hijack() (conn net.Conn, rw *bufio.ReadWriter, err error) {
	conn, rw, err = http.NewResponseController(h.ResponseWriter).Hijack()
	h.conn = conn
	return conn, rw, err
}

// refuse answers a client whose handshake is wrong.
func (h *handshake) refuse() {
	if h.failed {
		downstream.Error(h.ResponseWriter, openai.NewError(openai.CodeUnsupportedMessage, strings.TrimSpace(h.text)))
	}
}

// Reasons of close frames.
const (
	reasonLeaving = "the server is shutting down; open a new connection"
	reasonIdle    = "no request came within server.idle_timeout"
	reasonCut     = "the response was cut"
	reasonBinary  = "only text messages are served"
	reasonRefused = "the message was refused"
	reasonText    = "the text of the message is not valid UTF-8"
)

// idleTimeout returns how long a WebSocket may be open without a response.
func (b *Bridge) idleTimeout() time.Duration { return time.Duration(b.config().Server.IdleTimeout) }

// asError returns the answer for an error of a body.
func asError(err error) *openai.Error {
	var e *openai.Error
	if errors.As(err, &e) {
		return e
	}
	return openai.NewError(openai.CodeBodyIncomplete, "the message could not be read")
}
