package epp

import (
	"context"
	"errors"
	"net/http"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/epp/grpcserver"
)

// call is the gRPC stream of a gateway, a grpcserver.Stream.
type call interface {
	Take() (grpcserver.Message, bool)
	Arrived() <-chan struct{}
	Send(more bool, parts grpcserver.Parts) error
	Flush()
	End(err error)
	Cancel(cause error)
	RemoteAddr() string
}

// stream is one ext_proc stream: one request of a client of the gateway, and its answer. The
// goroutine of the gRPC handler owns it.
type stream struct {
	server *Server
	grpc   call
	ctx    context.Context // of the request; ends with the gateway's side of the stream

	requestMode, responseMode filter.ProcessingMode_BodySendMode
	client                    clientRequest
	bodied                    bool      // the request has a body, which may be empty
	bodyOver, trailers        bool      // the end of the request has come; it has trailers
	forwarded                 bool      // the gateway has the decision
	headPending               bool      // the gateway waits for the answer to the response's head
	answerBegun, answerOver   bool      // a part of the response's body, and the end of the response, have come
	unsent                    bool      // the gateway gets the reply of this process although it has the decision
	cuts                      bool      // the gateway must end the answer with the reply, or cut it
	chosen                    string    // the first endpoint of the decision
	shown                     *incoming // has the last bytes that Next has returned
	early                     *incoming // has arrived, and the next call of next returns it; nil: none
	reply                     reply
	rpc                       *rpc      // nil: the client does not speak gRPC
	space                     string    // namespace of the facts about the request; "": none
	used                      message   // the facts that are known at the end of the answer, a Struct
	last                      *outgoing // answer to the last message of the engine's answer, which waits for used; nil: none

	reading atomic.Bool // the handler waits for a part of the request's body
	full    atomic.Bool // there is no memory for the request's body
	mu      sync.Mutex
	by      time.Time     // ends reads of the request's body; zero: never; guarded by mu
	changed chan struct{} // has a value when by has changed during a read; nil: no read waits; guarded by mu
}

// process serves a stream of a gateway.
func (s *Server) process(g *grpcserver.Stream) error {
	st := &stream{server: s, grpc: g, ctx: g.Context()}
	st.reply.header = make(http.Header)
	g.OnFull(st.outOfMemory)

	first, err := st.next(st.ctx)
	switch {
	case err == grpcserver.ErrMemory:
		downstream.Error(st, downstream.ErrMemory)
		return st.sendReply()
	case err == errMalformed:
		return err
	case err != nil:
		return nil // the gateway has left
	case first.size > s.options.MaxHeader+headRoom:
		http.Error(st, "the header of the request is larger than server.max_header", http.StatusRequestHeaderFieldsTooLarge)
		return st.sendReply()
	}
	s.requested.Store(time.Now().UnixNano())
	if err := st.open(first); err != nil {
		if s.misused.Allow(err.Error()) {
			s.options.Log.Warn("a gateway uses ext_proc in a way that cannot be served", "error", err)
		}
		return err
	}
	r, refusal := st.request(first)
	if refusal != nil {
		downstream.Error(st, refusal)
		return st.sendReply()
	}
	defer st.rpc.end()
	if !st.handle(r) {
		return status.Error(codes.Internal, "the endpoint picker failed")
	}
	return st.finish()
}

// outOfMemory ends the request because there is no memory for its body. It returns false if the
// gateway gets no answer to the request, because it has one or because the request runs.
func (st *stream) outOfMemory() bool {
	if !st.reading.Load() {
		return false
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	st.full.Store(true)
	st.lookAgain()
	return true
}

// take returns the next message that has arrived; nil: none. A malformed message ends the stream.
func (st *stream) take() *incoming {
	if m := st.early; m != nil {
		st.early = nil
		return m
	}
	from, ok := st.grpc.Take()
	if !ok {
		return nil
	}
	m := new(incoming)
	if !m.accept(from) {
		st.grpc.Cancel(errMalformed)
		return nil
	}
	m.shorten(st.server.options.MaxHeader + headRoom)
	m.counted()
	return m
}

// next waits for the next message. The error is the cause of the end of ctx, which ends with st.ctx at
// the latest. The messages that have arrived before it still count. The header of a request stays in
// memory until the end of the stream.
func (st *stream) next(ctx context.Context) (*incoming, error) {
	for {
		if m := st.take(); m != nil {
			return m, nil
		}
		st.grpc.Flush()
		select {
		case <-st.grpc.Arrived():
			continue
		case <-ctx.Done():
		}
		if m := st.take(); m != nil { // it has arrived since the first look
			return m, nil
		}
		return nil, context.Cause(ctx)
	}
}

// arrived reports whether the next message has arrived.
func (st *stream) arrived() bool {
	if st.early == nil {
		st.early = st.take()
	}
	return st.early != nil
}

// endArrived reports whether the message that ends the answer's body, without further bytes, has
// arrived. It then consumes the message.
func (st *stream) endArrived() bool {
	if !st.arrived() || st.early.of != fieldResponseBody || !st.early.over || len(st.early.body) > 0 {
		return false
	}
	st.early.release()
	st.early = nil
	return true
}

// nextOfBody is next with the deadline of the request's body, also one that passes during the wait.
func (st *stream) nextOfBody() (*incoming, error) {
	st.reading.Store(true)
	defer st.reading.Store(false)
	for {
		st.mu.Lock()
		by := st.by
		st.mu.Unlock()
		switch {
		case st.full.Load():
			return nil, downstream.ErrMemory
		case !by.IsZero() && !time.Now().Before(by):
			return nil, os.ErrDeadlineExceeded
		}
		if m := st.take(); m != nil {
			return m, nil
		}
		if err := st.waitForBody(); err != nil {
			return nil, err
		}
	}
}

// waitForBody waits until a message has arrived, or the deadline passes or changes.
func (st *stream) waitForBody() error {
	st.grpc.Flush()
	st.mu.Lock()
	if st.changed == nil {
		st.changed = make(chan struct{}, 1)
	}
	var passed <-chan time.Time
	if !st.by.IsZero() {
		passed = time.After(time.Until(st.by))
	}
	changed := st.changed
	st.mu.Unlock()
	select {
	case <-st.grpc.Arrived():
	case <-passed:
	case <-changed:
	case <-st.ctx.Done():
		return context.Cause(st.ctx)
	}
	return nil
}

// SetReadDeadline ends reads of the request's body at that time, also the running one; zero:
// never. It is for http.ResponseController and safe for concurrent use.
func (st *stream) SetReadDeadline(by time.Time) error {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.by = by
	st.lookAgain()
	return nil
}

// lookAgain makes a read of the request's body that waits look at its limits. The caller holds st.mu.
func (st *stream) lookAgain() {
	select {
	case st.changed <- struct{}{}:
	default:
	}
}

// EnableFullDuplex is for http.ResponseController: the body may be read after the answer has
// begun.
func (st *stream) EnableFullDuplex() error { return nil }

// open checks the way in which the gateway uses the protocol.
func (st *stream) open(first *incoming) error {
	if first.of != fieldRequestHeaders {
		return status.Error(codes.InvalidArgument, "the first message must have the headers of a request: set request_header_mode SEND")
	}
	if first.observes {
		return status.Error(codes.InvalidArgument, "observability_mode cannot be served: the gateway would ignore the endpoint")
	}
	st.requestMode, st.responseMode = filter.ProcessingMode_FULL_DUPLEX_STREAMED, filter.ProcessingMode_FULL_DUPLEX_STREAMED
	if first.configured { // gateways before Envoy 1.34 do not send it
		st.requestMode, st.responseMode = first.requestMode, first.responseMode
	}
	switch st.requestMode {
	case filter.ProcessingMode_FULL_DUPLEX_STREAMED, filter.ProcessingMode_BUFFERED, filter.ProcessingMode_BUFFERED_PARTIAL:
		return nil
	}
	if first.over {
		return nil
	}
	return status.Errorf(codes.InvalidArgument, "request_body_mode %s cannot be served: the endpoint depends on the body; set FULL_DUPLEX_STREAMED or BUFFERED", st.requestMode)
}

// handle serves the request. ok is false after a panic.
func (st *stream) handle(r *http.Request) (ok bool) {
	defer func() {
		if v := recover(); v != nil && v != http.ErrAbortHandler {
			st.server.options.Log.Error("panic in an ext_proc stream", "panic", v, "stack", string(debug.Stack()))
		} else if v != nil {
			ok = st.forwarded || st.ctx.Err() != nil // a request that is cut: the gateway gets no answer
		}
	}()
	st.server.options.Handle(st, r, st)
	return true
}

// finish ends the stream after the request has been served.
func (st *stream) finish() error {
	if context.Cause(st.ctx) == grpcserver.ErrMemory {
		return grpcserver.ErrMemory
	}
	switch {
	case st.cuts:
		_ = st.sendReply() // a gateway that does not use it cuts the answer because of the error
		return errCut
	case st.ctx.Err() != nil:
		return nil
	case !st.forwarded || st.unsent:
		return st.sendReply()
	case st.tells():
		_ = st.endAnswer() // an error means that the gateway has left
	}
	return nil
}

// Errors of streams.
var (
	errOrder = errors.New("the gateway sent a message that does not belong there")
	errCut   = status.Error(codes.Aborted, "the request was cut")
)
