package extproc

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	service "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	envoytype "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

func TestMain(m *testing.M) { proxytest.Main(m) }

// picker is an endpoint picker that is written from the protocol alone. serve is the script of a
// stream.
type picker struct {
	service.UnimplementedExternalProcessorServer
	serve  func(*call) error
	mu     sync.Mutex
	listen *proxytest.PipeListener // guarded by mu; nil: nobody listens
	server *grpc.Server            // guarded by mu
}

// call is one stream, as the picker sees it.
type call struct {
	service.ExternalProcessor_ProcessServer
	p *picker
}

func (p *picker) Process(s service.ExternalProcessor_ProcessServer) error {
	return p.serve(&call{s, p})
}

// started returns a picker that serves until the end of the test, and a client of it.
func started(t *testing.T, o Options, serve func(*call) error) (*picker, *Client) {
	t.Helper()
	p := &picker{serve: serve}
	p.start()
	o.Address, o.Dial = "picker:9002", p.dial
	if o.Timeout == 0 {
		o.Timeout = time.Second
	}
	if o.MaxBody == 0 {
		o.MaxBody = 1 << 20
	}
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // in the order in which a process ends
		c.Close()
		p.stop()
	})
	return p, c
}

func (p *picker) start() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.listen, p.server = proxytest.NewPipeListener(), grpc.NewServer(grpc.WaitForHandlers(true))
	service.RegisterExternalProcessorServer(p.server, p)
	go p.server.Serve(p.listen) // ends with stop
}

// stop kills the picker.
func (p *picker) stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.server != nil {
		p.server.Stop()
		p.server, p.listen = nil, nil
	}
}

func (p *picker) dial(context.Context, string) (net.Conn, error) {
	p.mu.Lock()
	l := p.listen
	p.mu.Unlock()
	if l == nil {
		return nil, net.ErrClosed
	}
	return l.Dial()
}

// request receives the whole request.
func (c *call) request() (head map[string]string, body string, err error) {
	m, err := c.Recv()
	if err != nil {
		return nil, "", err
	}
	head = headOf(m.GetRequestHeaders().GetHeaders())
	for over := m.GetRequestHeaders().GetEndOfStream(); !over; {
		if m, err = c.Recv(); err != nil {
			return head, body, err
		}
		body += string(m.GetRequestBody().GetBody())
		over = m.GetRequestBody().GetEndOfStream() || m.GetRequestTrailers() != nil
	}
	return head, body, nil
}

func headOf(m *core.HeaderMap) map[string]string {
	head := map[string]string{}
	for _, l := range m.GetHeaders() {
		head[l.GetKey()] += string(l.GetRawValue())
	}
	return head
}

// answered is what the picker sees of an answer.
type answered struct {
	head         map[string]string
	served, body string
	whole        bool
	err          error // of the end of the stream
}

// answer receives the answer and answers each part, up to the end of the stream.
func (c *call) answer(changes *service.HeaderMutation) (a answered) {
	for {
		m, err := c.Recv()
		if err != nil {
			a.err = err
			return a
		}
		if h := m.GetResponseHeaders(); h != nil {
			a.head = headOf(h.GetHeaders())
			a.served = m.GetMetadataContext().GetFilterMetadata()[LBSpace].GetFields()[ServedKey].GetStringValue()
			c.Send(answerHead(changes))
			continue
		}
		b := m.GetResponseBody()
		a.body += string(b.GetBody())
		a.whole = a.whole || b.GetEndOfStream()
		c.Send(&service.ProcessingResponse{Response: &service.ProcessingResponse_ResponseBody{ResponseBody: streamed(string(b.GetBody()), b.GetEndOfStream())}})
	}
}

func answerHead(changes *service.HeaderMutation) *service.ProcessingResponse {
	return &service.ProcessingResponse{Response: &service.ProcessingResponse_ResponseHeaders{ResponseHeaders: &service.HeadersResponse{Response: &service.CommonResponse{HeaderMutation: changes}}}}
}

func set(pairs ...string) *service.HeaderMutation {
	m := &service.HeaderMutation{}
	for i := 0; i < len(pairs); i += 2 {
		m.SetHeaders = append(m.SetHeaders, &core.HeaderValueOption{Header: &core.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])}})
	}
	return m
}

func streamed(part string, over bool) *service.BodyResponse {
	return &service.BodyResponse{Response: &service.CommonResponse{BodyMutation: &service.BodyMutation{Mutation: &service.BodyMutation_StreamedResponse{
		StreamedResponse: &service.StreamedBodyResponse{Body: []byte(part), EndOfStream: over},
	}}}}
}

func headers(m *service.HeaderMutation) *service.ProcessingResponse {
	return &service.ProcessingResponse{Response: &service.ProcessingResponse_RequestHeaders{RequestHeaders: &service.HeadersResponse{Response: &service.CommonResponse{HeaderMutation: m}}}}
}

func bodyPart(part string, over bool) *service.ProcessingResponse {
	return &service.ProcessingResponse{Response: &service.ProcessingResponse_RequestBody{RequestBody: streamed(part, over)}}
}

func immediate(status int, body string) *service.ProcessingResponse {
	return &service.ProcessingResponse{Response: &service.ProcessingResponse_ImmediateResponse{ImmediateResponse: &service.ImmediateResponse{
		Status: &envoytype.HttpStatus{Code: envoytype.StatusCode(status)}, Body: []byte(body),
	}}}
}

func destinationMetadata(endpoints string) *structpb.Struct {
	return &structpb.Struct{Fields: map[string]*structpb.Value{LBSpace: structpb.NewStructValue(&structpb.Struct{
		Fields: map[string]*structpb.Value{HeaderDestination: structpb.NewStringValue(endpoints)},
	})}}
}

// chooses answers each request with that destination and its own body.
func chooses(destination string) func(*call) error {
	return func(c *call) error {
		_, body, err := c.request()
		if err != nil {
			return err
		}
		c.Send(headers(set(HeaderDestination, destination)))
		c.Send(bodyPart(body, true))
		c.answer(nil)
		return nil
	}
}

func request(body string) *Request {
	return &Request{Method: "POST", Scheme: "http", Authority: "proxy", Path: "/v1/completions", Body: []byte(body)}
}

// bubble runs a test in simulated time. All goroutines must end with it.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

var long = strings.Repeat("0123456789abcdef", 20_000) // several messages
