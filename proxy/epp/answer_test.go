package epp

import (
	"context"
	"io"
	"sync"
	"testing"

	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/mem"
)

// recorder is a gRPC stream that keeps the sent messages.
type recorder struct {
	extproc.ExternalProcessor_ProcessServer
	sent []any
}

// SendMsg implements grpc.ServerStream.
func (r *recorder) SendMsg(m any) error {
	r.sent = append(r.sent, m)
	return nil
}

// TestEndWithPart: the end of an answer goes back with the last part if both have arrived, and no
// message is lost or changes its place.
func TestEndWithPart(t *testing.T) {
	part := func(text string, over bool) *incoming {
		return &incoming{of: fieldResponseBody, body: []byte(text), over: over, held: mem.SliceBuffer(text)}
	}
	for name, c := range map[string]struct {
		arrived []*incoming
		text    string
		ends    []bool // of the parts that go back
		others  int    // other messages that go back
	}{
		"part and end":      {[]*incoming{part("a", false), part("", true)}, "a", []bool{true}, 0},
		"two parts and end": {[]*incoming{part("a", false), part("b", false), part("", true)}, "ab", []bool{false, true}, 0},
		"end with bytes":    {[]*incoming{part("a", false), part("b", true)}, "ab", []bool{false, true}, 0},
		"only an end":       {[]*incoming{part("", true)}, "", []bool{true}, 0},
		"part and trailers": {[]*incoming{part("a", false), {of: fieldResponseTrailers}}, "a", []bool{false}, 1},
	} {
		r := new(recorder)
		st := &stream{ctx: t.Context(), grpc: r, messages: make(chan *incoming, ahead), responseMode: filter.ProcessingMode_FULL_DUPLEX_STREAMED}
		for _, m := range c.arrived {
			st.messages <- m
		}
		text, err := "", error(nil)
		for err == nil {
			var p []byte
			p, err = st.Next(t.Context())
			text += string(p)
		}
		if err != io.EOF || text != c.text || len(r.sent) != len(c.ends)+c.others {
			t.Errorf("%s: got %q, %v and %d messages", name, text, err, len(r.sent))
			continue
		}
		for i, end := range c.ends {
			if o := r.sent[i].(*outgoing); o.over != end {
				t.Errorf("%s: part %d is the end: %t", name, i, o.over)
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
		st := &stream{messages: make(chan *incoming, ahead)}
		ctx, cancel := context.WithCancel(t.Context())
		st.ctx = ending{ctx, sync.OnceFunc(func() {
			st.messages <- &incoming{of: fieldResponseBody, over: true}
			cancel()
		})}
		if m, err := st.next(st.ctx); err != nil || !m.over {
			t.Fatalf("the last message is lost: %v", err)
		}
	}
}
