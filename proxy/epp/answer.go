package epp

import (
	"io"
	"net/http"
	"strconv"
	"strings"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	envoytype "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"github.com/pdproxy/pdproxy/proxy/attempt"
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
	if !st.forwarded {
		if st.reply.status == 0 {
			st.reply.status = status
		}
		return
	}
	if st.headPending {
		st.headPending = false
		_ = st.send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseHeaders{ // an error ends the context
			ResponseHeaders: &extproc.HeadersResponse{Response: &extproc.CommonResponse{HeaderMutation: headersOf(st.reply.header)}},
		}})
	}
}

// Write implements http.ResponseWriter.
func (st *stream) Write(p []byte) (int, error) {
	if st.reply.status == 0 {
		st.WriteHeader(http.StatusOK)
	}
	if !st.forwarded {
		st.reply.body = append(st.reply.body, p...)
	}
	return len(p), nil
}

// Flush implements http.Flusher. The whole reply is sent at its end.
func (st *stream) Flush() {}

// headersOf returns the header lines of an answer.
func headersOf(h http.Header) *extproc.HeaderMutation {
	m := &extproc.HeaderMutation{}
	for name, values := range h {
		for i, value := range values {
			action := core.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD
			if i > 0 {
				action = core.HeaderValueOption_APPEND_IF_EXISTS_OR_ADD
			}
			m.SetHeaders = append(m.SetHeaders, &core.HeaderValueOption{
				Header: &core.HeaderValue{Key: strings.ToLower(name), RawValue: []byte(value)}, AppendAction: action,
			})
		}
	}
	return m
}

// sendReply makes the gateway answer with the reply. Without a reply the connection is cut.
func (st *stream) sendReply() error {
	if st.reply.status == 0 {
		return errCut
	}
	st.reply.header.Del("Content-Length") // the gateway sets it
	return st.grpc.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ImmediateResponse{
		ImmediateResponse: &extproc.ImmediateResponse{
			Status:  &envoytype.HttpStatus{Code: envoytype.StatusCode(st.reply.status)},
			Headers: headersOf(st.reply.header), Body: st.reply.body, Details: "pdproxy",
		},
	}})
}

// Head implements attempt.Gateway.
func (st *stream) Head() (head attempt.GatewayHead, err error) {
	m, err := st.next()
	for err == nil && m.GetRequestTrailers() != nil { // of a buffered request
		if err = st.send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestTrailers{RequestTrailers: &extproc.TrailersResponse{}}}); err == nil {
			m, err = st.next()
		}
	}
	if err != nil {
		return head, err
	}
	h := m.GetResponseHeaders()
	if h == nil {
		return head, errOrder
	}
	st.headPending, st.answerOver = true, h.GetEndOfStream()
	for _, line := range h.GetHeaders().GetHeaders() {
		switch line.GetKey() {
		case ":status":
			head.Status, _ = strconv.Atoi(valueOf(line)) // 0 counts as a failure
		case "content-type":
			head.Events = strings.HasPrefix(strings.ToLower(valueOf(line)), "text/event-stream")
		}
	}
	head.Hidden = st.responseMode == filter.ProcessingMode_NONE && !st.answerOver
	head.Other = st.servedByOther(m.GetMetadataContext())
	return head, nil
}

// servedByOther reports whether the gateway names another endpoint than the first one of the
// decision as the one that has answered.
func (st *stream) servedByOther(m *core.Metadata) bool {
	served := m.GetFilterMetadata()[lbSpace].GetFields()[servedKey].GetStringValue()
	return served != "" && served != st.chosen
}

// Next implements attempt.Gateway.
func (st *stream) Next() ([]byte, error) {
	st.shown.release()
	st.shown = nil
	if st.answerOver {
		return nil, io.EOF
	}
	m, err := st.next()
	if err != nil && st.responseMode == filter.ProcessingMode_NONE && st.server.running.Err() == nil {
		return nil, io.EOF // the gateway shows no body: its stream ends with the answer
	}
	if err != nil {
		return nil, err
	}
	if m.GetResponseTrailers() != nil {
		st.answerOver = true
		if err := st.send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extproc.TrailersResponse{}}}); err != nil {
			return nil, err
		}
		return nil, io.EOF
	}
	if m.of != fieldResponseBody {
		return nil, errOrder
	}
	st.answerOver, st.shown = m.over, m
	if st.responseMode == filter.ProcessingMode_FULL_DUPLEX_STREAMED {
		return m.body, st.sendPart(returned(m))
	}
	return m.body, st.send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseBody{
		ResponseBody: &extproc.BodyResponse{Response: &extproc.CommonResponse{}},
	}})
}
