package epp

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	_ "google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// hostile is an HTTP/2 client that ignores flow control of its connection.
type hostile struct {
	net.Conn
	framer *http2.Framer
	block  bytes.Buffer
	encode *hpack.Encoder

	mu      sync.Mutex
	windows map[uint32]chan struct{} // closed when the stream may send a long message, or has ended
	ended   map[uint32]string        // grpc-status
	data    map[uint32][]byte
	next    uint32
	over    chan struct{} // closed when the connection has ended
}

// attack opens a hostile connection. window is the window for answers.
func (s *served) attack(t *testing.T, window uint32) *hostile {
	t.Helper()
	c, err := s.listener.Dial()
	if err != nil {
		t.Fatal(err)
	}
	h := &hostile{Conn: c, framer: http2.NewFramer(c, c), windows: map[uint32]chan struct{}{}, ended: map[uint32]string{}, data: map[uint32][]byte{}, next: 1, over: make(chan struct{})}
	h.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	h.encode = hpack.NewEncoder(&h.block)
	go func() { // ends with the connection
		defer close(h.over)
		h.read()
	}()
	t.Cleanup(func() { c.Close(); <-h.over })
	io.WriteString(c, http2.ClientPreface)
	h.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: window})
	return h
}

func (h *hostile) read() {
	for {
		f, err := h.framer.ReadFrame()
		if err != nil {
			return
		}
		h.mu.Lock()
		switch f := f.(type) {
		case *http2.WindowUpdateFrame:
			if w := h.windows[f.StreamID]; w != nil {
				close(w)
				delete(h.windows, f.StreamID)
			}
		case *http2.DataFrame:
			h.data[f.StreamID] = append(h.data[f.StreamID], f.Data()...)
		case *http2.MetaHeadersFrame:
			for _, l := range f.Fields {
				if l.Name == "grpc-status" {
					h.ended[f.StreamID] = l.Value
					if w := h.windows[f.StreamID]; w != nil {
						close(w)
						delete(h.windows, f.StreamID)
					}
				}
			}
		}
		h.mu.Unlock()
	}
}

// open opens a stream of that method.
func (h *hostile) open(method string) uint32 {
	id := h.next
	h.next += 2
	h.block.Reset()
	for _, l := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", method}, {":authority", "x"}, {"content-type", "application/grpc"}, {"te", "trailers"}} {
		h.encode.WriteField(hpack.HeaderField{Name: l[0], Value: l[1]})
	}
	h.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: h.block.Bytes(), EndHeaders: true})
	return id
}

// send sends a message and the begin of another message of length bytes, without the last byte.
func (h *hostile) send(id uint32, whole []byte, length int) {
	long := make(chan struct{})
	h.mu.Lock()
	h.windows[id] = long
	h.mu.Unlock()
	head := func(n int) []byte { return binary.BigEndian.AppendUint32([]byte{0}, uint32(n)) }
	first := head(length)
	if whole != nil {
		first = append(append(head(len(whole)), whole...), first...)
	}
	h.framer.WriteData(id, false, first)
	if length > 1<<20 { // the window of a stream
		select {
		case <-long:
		case <-h.over:
			return
		}
	}
	part := make([]byte, 16<<10)
	for left := length - 1; left > 0; left -= len(part) {
		part = part[:min(len(part), left)]
		if h.framer.WriteData(id, false, part) != nil {
			return
		}
	}
}

// post is the header of a request with a body.
var post = &extproc.ProcessingRequest{
	Request: &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: &extproc.HttpHeaders{Headers: &core.HeaderMap{Headers: []*core.HeaderValue{
		{Key: ":method", RawValue: []byte("POST")}, {Key: ":path", RawValue: []byte("/")}, {Key: ":authority", RawValue: []byte("x")},
	}}}},
	ProtocolConfig: &extproc.ProtocolConfiguration{RequestBodyMode: filter.ProcessingMode_FULL_DUPLEX_STREAMED},
}

// reading is a picker whose requests are answered with 204 after their body, in a budget of 256 MiB.
func reading(t *testing.T) *served {
	s := serve(t)
	s.options.Memory.SetLimit(256 << 20)
	s.options.Handle = func(w http.ResponseWriter, r *http.Request, _ attempt.Gateway) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			if e, ok := err.(*openai.Error); ok {
				downstream.Error(w, e)
			}
			return
		}
		w.WriteHeader(http.StatusNoContent)
	}
	return s
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestPartialMessagesAreLimited: many streams with messages without an end stay within the limit,
// whatever kind of message it is. Another gateway's requests are served meanwhile.
func TestPartialMessagesAreLimited(t *testing.T) {
	whole, err := proto.Marshal(post)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		method string
		whole  []byte
		window uint32
		apart  bool // each stream has its own connection
	}{
		"headers":               {extproc.ExternalProcessor_Process_FullMethodName, nil, 65535, true},
		"bodies":                {extproc.ExternalProcessor_Process_FullMethodName, whole, 65535, true},
		"bodies, no window":     {extproc.ExternalProcessor_Process_FullMethodName, whole, 0, false},
		"headers, 1 connection": {extproc.ExternalProcessor_Process_FullMethodName, nil, 65535, false},
		"health checks":         {grpc_health_v1.Health_Check_FullMethodName, nil, 65535, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := reading(t)
			before := heap()
			honest := s.dial(t)
			var one *hostile
			const streams, length = 24, 16 << 20
			// The reader of a connection counts memory before it enforces the limit. So the counter may
			// exceed twice the limit, which is a quarter of the budget, by one step of each connection.
			const step = 4 << 20
			most := s.options.Memory.Limit()/2 + (streams+1)*step
			for range streams {
				if one == nil || tt.apart {
					one = s.attack(t, tt.window)
				}
				one.send(one.open(tt.method), tt.whole, length)
				if held := s.options.Memory.Used(); held > most {
					t.Errorf("%d bytes are held, want at most %d", held, most)
				}
				st := open(t, honest)
				if err := st.Send(post); err != nil {
					t.Fatal(err)
				}
				if err := st.Send(&extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{Body: make([]byte, 100<<10), EndOfStream: true}}}); err != nil {
					t.Fatal(err)
				}
				wantAnswer(t, st)
			}
			if used := heap() - before; used > most+32<<20 {
				t.Errorf("%d MiB are in use", used>>20)
			}
		})
	}
}

// TestNoMemoryIsAnswered: the stream that ends gets an answer for its client, before and after the
// header.
func TestNoMemoryIsAnswered(t *testing.T) {
	whole, err := proto.Marshal(post)
	if err != nil {
		t.Fatal(err)
	}
	for name, first := range map[string][]byte{"header": nil, "body": whole} {
		t.Run(name, func(t *testing.T) {
			s := reading(t)
			h := s.attack(t, 65535)
			for range 8 { // the limit is 64 MiB
				h.send(h.open(extproc.ExternalProcessor_Process_FullMethodName), first, 16<<20)
			}
			for answered := ""; !strings.Contains(answered, "memory_limit"); time.Sleep(time.Millisecond) { // the test's time limit
				h.mu.Lock()
				for id, p := range h.data {
					if h.ended[id] == "0" {
						answered += string(p)
					}
				}
				h.mu.Unlock()
			}
		})
	}
}

// TestLongHeaderIsRefused: the message of a header is much shorter than that of a body may be.
func TestLongHeaderIsRefused(t *testing.T) {
	s := serve(t)
	close(s.release)
	st := open(t, s.dial(t))
	long := proto.Clone(getRequest).(*extproc.ProcessingRequest)
	h := long.GetRequestHeaders().GetHeaders()
	h.Headers = append(h.Headers, &core.HeaderValue{Key: "x-long", RawValue: make([]byte, 2<<20)})
	if err := st.Send(long); err != nil {
		t.Fatal(err)
	}
	if r, err := st.Recv(); err != nil || r.GetImmediateResponse().GetStatus().GetCode() != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("got %v, %v", r, err)
	}
}

// TestCompressedMessagesAreRefused: a short message must not become a long one.
func TestCompressedMessagesAreRefused(t *testing.T) {
	c := serve(t).dial(t)
	if _, err := grpc_health_v1.NewHealthClient(c).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: strings.Repeat("x", 1<<20)}, grpc.UseCompressor("gzip")); status.Code(err) != codes.Unimplemented {
		t.Errorf("got %v", err)
	}
}
