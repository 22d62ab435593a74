package epp

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"

	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"

	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// reply is the answer of this process, for a request that the gateway does not send.
type reply struct {
	header http.Header
	status int // 0: none yet
	body   []byte
}

// Header implements http.ResponseWriter.
func (st *stream) Header() http.Header { return st.reply.header }

// WriteHeader implements http.ResponseWriter. If the gateway has sent the request, it passes the
// engine's answer on, with the lines of Header.
func (st *stream) WriteHeader(status int) {
	if !st.forwarded || st.unsent {
		if st.reply.status == 0 {
			st.reply.status = status
		}
		return
	}
	if st.headPending {
		st.headPending = false
		common := message(nil).with(2, headersOf(st.reply.header)) // header_mutation
		more := st.arrived()                                       // Next answers the next message at once
		_ = st.send(more, answerTo(fieldResponseHeaders, common.within(1)))
	}
}

// Write implements http.ResponseWriter.
func (st *stream) Write(p []byte) (int, error) {
	if st.reply.status == 0 {
		st.WriteHeader(http.StatusOK)
	}
	if !st.forwarded || st.unsent {
		st.reply.body = append(st.reply.body, p...)
	}
	return len(p), nil
}

// Flush implements http.Flusher. The whole reply is sent at its end.
func (st *stream) Flush() {}

// sendReply makes the gateway answer with the reply. Without a reply the connection is cut.
func (st *stream) sendReply() error {
	if st.reply.status == 0 {
		return errCut
	}
	st.reply.header.Del("Content-Length") // the gateway sets it
	reply := immediate(st.reply.status, st.reply.header, st.reply.body, nil)
	if st.rpc != nil {
		reply = st.refusal()
	}
	if err := st.send(true, append(reply, st.cost()...)); err != nil {
		return errCut
	}
	return nil
}

// Head implements attempt.Gateway.
func (st *stream) Head(ctx context.Context) (head attempt.GatewayHead, err error) {
	m, err := st.next(ctx)
	for err == nil && m.of == fieldRequestTrailers { // of a buffered request
		if err = st.send(false, answerTo(m.of, nil)); err == nil {
			m, err = st.next(ctx)
		}
	}
	if err != nil {
		st.unsent = ctx.Err() != nil && st.ctx.Err() == nil
		return head, err
	}
	if m.of != fieldResponseHeaders {
		return head, errOrder
	}
	st.headPending, st.answerOver = true, m.over
	for _, l := range m.lines {
		switch l.name {
		case ":status":
			head.Status, _ = strconv.Atoi(l.value) // 0 counts as a failure
		case "retry-after":
			head.RetryAfter = l.value
		case "content-type":
			head.Events = strings.HasPrefix(strings.ToLower(l.value), "text/event-stream")
		}
	}
	if st.rpc != nil && head.Status == http.StatusOK {
		head.Status, head.Events = st.rpc.head(m)
	}
	head.Hidden = st.responseMode == filter.ProcessingMode_NONE && !st.answerOver
	if head.Other = m.served != "" && m.served != st.chosen; head.Other { // the first endpoint of the decision has not answered
		head.Engines = st.server.destinations.at(m.served)
	}
	return head, nil
}

// Next implements attempt.Gateway.
func (st *stream) Next(ctx context.Context) ([]byte, error) {
	if st.last == nil { // last may have bytes of it
		st.shown.release()
		st.shown = nil
	}
	if st.answerOver {
		return nil, io.EOF
	}
	m, err := st.next(ctx)
	if err != nil && ctx.Err() == st.ctx.Err() && st.responseMode == filter.ProcessingMode_NONE && context.Cause(st.ctx) == context.Canceled {
		return nil, io.EOF // the gateway shows no body: its stream ends with the answer
	}
	if err != nil {
		return nil, err
	}
	if m.of == fieldResponseTrailers {
		st.answerOver = true
		if err := st.keepLast(outgoing{head: answerTo(m.of, nil)}); err != nil {
			return nil, err
		}
		return st.seen(m), io.EOF
	}
	if m.of != fieldResponseBody {
		return nil, errOrder
	}
	st.shown, st.answerBegun = m, true
	if st.responseMode == filter.ProcessingMode_FULL_DUPLEX_STREAMED {
		m.over = m.over || st.endArrived() // one message less
		st.answerOver = m.over
		return st.seen(m), st.keepLast(returned(m.of, m.body, m.over))
	}
	st.answerOver = m.over
	return st.seen(m), st.keepLast(outgoing{head: carryOn(m.of)})
}

// seen returns the part of the answer that the exchange sees for a message of the gateway.
func (st *stream) seen(m *incoming) []byte {
	if st.rpc.reads() {
		return st.rpc.next(m)
	}
	return m.body
}

// Stop implements attempt.Gateway. The event takes the place of the next part of the body: Envoy refuses a
// part before it has sent the first one.
func (st *stream) Stop(e *openai.Error, event []byte) {
	if st.responseMode != filter.ProcessingMode_FULL_DUPLEX_STREAMED || !st.answerBegun || len(event) == 0 || st.rpc != nil {
		st.cuts, st.unsent = true, true
		downstream.Error(st, e)
		return
	}
	st.answerOver = true
	_ = st.keepLast(returned(fieldResponseBody, slices.Clone(event), true)) // an error ends the context
}
