package epp

import (
	"bytes"
	"context"
	"io"
	"slices"
	"sync"
	"testing"

	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/proto"

	"github.com/pdproxy/pdproxy/proxy/epp/grpcserver"
)

// recorder is a gRPC stream that has messages, and keeps the sent ones.
type recorder struct {
	messages []*extproc.ProcessingRequest
	arrives  chan struct{}
	sent     [][]byte
	ended    bool
}

// Take implements call.
func (r *recorder) Take() (m grpcserver.Message, ok bool) {
	if len(r.messages) == 0 {
		return m, false
	}
	m.Data, _ = proto.Marshal(r.messages[0])
	r.messages = r.messages[1:]
	return m, true
}

// Send implements call.
func (r *recorder) Send(_ bool, parts grpcserver.Parts) error {
	r.sent = append(r.sent, bytes.Join(parts[:], nil))
	return nil
}

// Arrived implements call.
func (r *recorder) Arrived() <-chan struct{} { return r.arrives }

// Flush implements call.
func (r *recorder) Flush() {}

// End implements call.
func (r *recorder) End(error) { r.ended = true }

// Cancel implements call.
func (r *recorder) Cancel(error) {}

// RemoteAddr implements call.
func (r *recorder) RemoteAddr() string { return "" }

// partOf is a part of an answer's body.
func partOf(text string, over bool) *extproc.ProcessingRequest {
	return &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_ResponseBody{ResponseBody: &extproc.HttpBody{Body: []byte(text), EndOfStream: over}}}
}

// TestEndWithPart: the end of an answer goes back with the last part if both have arrived, and no
// message is lost or changes its place.
func TestEndWithPart(t *testing.T) {
	type messages = []*extproc.ProcessingRequest
	for name, c := range map[string]struct {
		arrived messages
		text    string
		ends    []bool // of the parts that go back
		others  int    // other messages that go back
	}{
		"part and end":      {messages{partOf("a", false), partOf("", true)}, "a", []bool{true}, 0},
		"two parts and end": {messages{partOf("a", false), partOf("b", false), partOf("", true)}, "ab", []bool{false, true}, 0},
		"end with bytes":    {messages{partOf("a", false), partOf("b", true)}, "ab", []bool{false, true}, 0},
		"only an end":       {messages{partOf("", true)}, "", []bool{true}, 0},
		"part and trailers": {messages{partOf("a", false), {Request: &extproc.ProcessingRequest_ResponseTrailers{}}}, "a", []bool{false}, 1},
	} {
		r := &recorder{messages: slices.Clone(c.arrived)}
		st := &stream{server: &Server{}, ctx: t.Context(), grpc: r, responseMode: filter.ProcessingMode_FULL_DUPLEX_STREAMED}
		text, err := "", error(nil)
		for err == nil {
			var p []byte
			p, err = st.Next(t.Context())
			text += string(p)
		}
		if err != io.EOF || text != c.text || len(r.sent) != len(c.ends)+c.others || !r.ended {
			t.Errorf("%s: got %q, %v and %d messages, ended: %t", name, text, err, len(r.sent), r.ended)
			continue
		}
		for i, end := range c.ends {
			over := decoded(t, outgoing{head: r.sent[i]}).GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse().GetEndOfStream()
			if over != end {
				t.Errorf("%s: part %d is the end: %t", name, i, over)
			}
		}
	}
}

// ending is a context that ends, after a last message has arrived, while a reader begins to wait.
type ending struct {
	context.Context
	ends func()
}

// Done implements context.Context.
func (e ending) Done() <-chan struct{} {
	e.ends()
	return e.Context.Done()
}

// TestLastMessage: a message that arrives just before the gateway ends the stream is not lost.
func TestLastMessage(t *testing.T) {
	for range 64 { // Go chooses at random between a message and the end of the context
		r := &recorder{arrives: make(chan struct{}, 1)}
		st := &stream{server: &Server{}, grpc: r}
		ctx, cancel := context.WithCancel(t.Context())
		st.ctx = ending{ctx, sync.OnceFunc(func() {
			r.messages = append(r.messages, partOf("", true))
			r.arrives <- struct{}{}
			cancel()
		})}
		if m, err := st.next(st.ctx); err != nil || !m.over {
			t.Fatalf("the last message is lost: %v", err)
		}
	}
}
