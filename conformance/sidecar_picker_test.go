package conformance

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	envoytype "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// choosing is an endpoint picker that is written from the protocol. It answers each request as
// choose does, and reads the engine's answer.
type choosing struct {
	extproc.UnimplementedExternalProcessorServer
	choose func(pickerStream, *pickerQuery) error
	served chan string // the endpoint that has answered, of each request; nil: not needed
}

type pickerStream = extproc.ExternalProcessor_ProcessServer

// pickerQuery is the request that a picker has got.
type pickerQuery struct {
	header map[string]string
	body   string
	subset []string
}

func (p *choosing) Process(s extproc.ExternalProcessor_ProcessServer) error {
	q := &pickerQuery{header: map[string]string{}}
	for {
		m, err := s.Recv()
		if err != nil {
			return nil
		}
		switch r := m.Request.(type) {
		case *extproc.ProcessingRequest_RequestHeaders:
			for _, l := range r.RequestHeaders.GetHeaders().GetHeaders() {
				q.header[l.GetKey()] = string(l.GetRawValue())
			}
			for _, v := range m.GetMetadataContext().GetFilterMetadata()["envoy.lb.subset_hint"].GetFields()["x-gateway-destination-endpoint-subset"].GetListValue().GetValues() {
				q.subset = append(q.subset, v.GetStringValue())
			}
		case *extproc.ProcessingRequest_RequestBody:
			if q.body += string(r.RequestBody.GetBody()); r.RequestBody.GetEndOfStream() {
				if err := p.choose(s, q); err != nil {
					return err
				}
			}
		case *extproc.ProcessingRequest_ResponseHeaders:
			if p.served != nil {
				p.served <- m.GetMetadataContext().GetFilterMetadata()["envoy.lb"].GetFields()["x-gateway-destination-endpoint-served"].GetStringValue()
			}
			s.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extproc.HeadersResponse{}}})
		}
	}
}

// startPicker starts an endpoint picker, and returns its address for sidecar.picker.
func startPicker(t *testing.T, p *choosing) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.WaitForHandlers(true))
	extproc.RegisterExternalProcessorServer(server, p)
	ended := make(chan struct{})
	go func() { // ends with Stop
		defer close(ended)
		server.Serve(l)
	}()
	t.Cleanup(func() {
		server.Stop()
		<-ended
	})
	return "ext_proc://" + l.Addr().String()
}

// head answers the header of the request: the destination is that text; "" for none.
func head(s pickerStream, destination string) {
	m := &extproc.HeaderMutation{}
	if destination != "" {
		m.SetHeaders = []*core.HeaderValueOption{{Header: &core.HeaderValue{Key: "x-gateway-destination-endpoint", RawValue: []byte(destination)}}}
	}
	s.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestHeaders{RequestHeaders: &extproc.HeadersResponse{
		Response: &extproc.CommonResponse{HeaderMutation: m},
	}}})
}

// body answers the body of the request.
func body(s pickerStream, text string) {
	s.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestBody{RequestBody: &extproc.BodyResponse{
		Response: &extproc.CommonResponse{BodyMutation: &extproc.BodyMutation{Mutation: &extproc.BodyMutation_StreamedResponse{
			StreamedResponse: &extproc.StreamedBodyResponse{Body: []byte(text), EndOfStream: true},
		}}},
	}}})
}

// names is a picker that always names that destination.
func names(destination func() string) func(pickerStream, *pickerQuery) error {
	return func(s pickerStream, q *pickerQuery) error {
		head(s, destination())
		body(s, q.body)
		return nil
	}
}

// pickAlways is a picker that has only one decode engine, d1.
func pickAlways(f **fleet) *choosing {
	return &choosing{choose: names(func() string { return (*f).decode[1].Addr() })}
}

// TestSidecarAsksThePicker: the picker chooses decode when prefill is done, or earlier where both
// legs begin at once, and sees the answer.
func TestSidecarAsksThePicker(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		var f *fleet
		asked, by := make(chan *pickerQuery, 10), make(chan string, 1)
		p := &choosing{served: make(chan string, 10)}
		p.choose = func(s pickerStream, q *pickerQuery) error {
			asked <- q
			switch at := f.decode[1].Addr(); <-by {
			case "header":
				head(s, at+",1.2.3.4:5")
			case "best available":
				head(s, "1.2.3.4:5,"+at)
			case "metadata":
				space := structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{"x-gateway-destination-endpoint": structpb.NewStringValue(at)}})
				s.Send(&extproc.ProcessingResponse{
					DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{"envoy.lb": space}},
					Response:        &extproc.ProcessingResponse_RequestHeaders{RequestHeaders: &extproc.HeadersResponse{}},
				})
			}
			body(s, q.body)
			return nil
		}
		address := startPicker(t, p)
		f = startSidecar(t, connector, enginesim.RolePrefill, fleetOptions{config: func(c *config.Config) {
			c.Sidecar.Picker, c.Sidecar.PickerTimeout, c.Sidecar.PickerSubset = address, config.Duration(10*time.Second), true
		}})
		for _, how := range []string{"header", "best available", "metadata"} {
			for range 2 { // least_load alone would not choose d1 twice
				by <- how
				body := chat("picked "+how+long, 12, true)
				a := f.tell(body)
				f.right(a, chatPath, body)
				if a.header.Get("X-Pdproxy-Decode") != "d1" {
					t.Errorf("%s: decoded by %s", how, a.header.Get("X-Pdproxy-Decode"))
				}
				if policy, fallbacks := f.coordination(a); policy != "decode_picked" || len(fallbacks) > 0 {
					t.Errorf("%s: placed by %s with %v", how, policy, fallbacks)
				}
				q := <-asked
				if q.header["x-prefiller-host-port"] != f.prefill[0].Addr() || q.header[":path"] != chatPath || len(q.subset) != 2 || !strings.Contains(q.body, how) {
					t.Errorf("%s: the picker got %v, a subset of %v, and a body of %d bytes", how, q.header, q.subset, len(q.body))
				}
				if served := <-p.served; served != f.decode[1].Addr() {
					t.Errorf("%s: the picker saw the answer of %s", how, served)
				}
			}
		}
		if n := f.decode[0].State().Requests; n > 0 {
			t.Errorf("the engine that was not picked saw %d requests", n)
		}
	})
}

// TestSidecarWithoutAPick: when the picker fails in any way, the local policy decides, and this is
// counted.
func TestSidecarWithoutAPick(t *testing.T) {
	var f *fleet
	for _, tt := range []struct {
		name, reason string
		choose       func(pickerStream, *pickerQuery) error
	}{
		{"times out", "timeout", func(s pickerStream, _ *pickerQuery) error { <-s.Context().Done(); return nil }},
		{"hangs up", "unavailable", func(pickerStream, *pickerQuery) error { return context.Canceled }},
		{"refuses the request", "refused", func(s pickerStream, _ *pickerQuery) error {
			return s.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ImmediateResponse{
				ImmediateResponse: &extproc.ImmediateResponse{Status: &envoytype.HttpStatus{Code: 429}},
			}})
		}},
		{"answers the body first", "bad_answer", func(s pickerStream, q *pickerQuery) error { body(s, q.body); return nil }},
		{"changes the body", "bad_answer", func(s pickerStream, _ *pickerQuery) error {
			head(s, f.decode[1].Addr())
			body(s, chat("another prompt", 1, true))
			return nil
		}},
		{"answers nothing", "no_destination", names(func() string { return "" })},
		{"answers garbage", "not_allowed", names(func() string { return "\x7fgarbage" })},
		{"answers a stranger", "not_allowed", names(func() string { return "169.254.169.254:80" })},
		{"answers a prefill engine", "not_allowed", names(func() string { return f.prefill[1].Addr() })},
	} {
		t.Run(tt.name, func(t *testing.T) {
			timeout := time.Minute
			if tt.reason == "timeout" {
				timeout = 200 * time.Millisecond
			}
			address := startPicker(t, &choosing{choose: tt.choose})
			f = startSidecar(t, enginesim.ConnectorVLLMNixl, enginesim.RolePrefill, fleetOptions{config: func(c *config.Config) {
				c.Sidecar.Picker, c.Sidecar.PickerTimeout = address, config.Duration(timeout)
			}})
			body := chat("unpicked "+tt.name+long, 12, true)
			a := f.tell(body)
			f.right(a, chatPath, body)
			if a.header.Get("X-Pdproxy-Prefill") != "p0" || a.header.Get("X-Pdproxy-Decode") == "" {
				t.Errorf("legs on %v", a.header)
			}
			if policy, fallbacks := f.coordination(a); policy != "decode_picked" || strings.Join(fallbacks, " ") != "decode_picked/"+tt.reason {
				t.Errorf("placed by %s with %v", policy, fallbacks)
			}
			if n := f.metric("pdproxy_fallbacks_total", `what="decode_picked"`, `reason="`+tt.reason+`"`); n != 1 {
				t.Errorf("counted %v times", n)
			}
		})
	}
}

// TestSidecarClientLeavesWhileThePickerThinks: prefill's blocks, which will not be read, are freed.
func TestSidecarClientLeavesWhileThePickerThinks(t *testing.T) {
	asked := make(chan struct{}, 1)
	address := startPicker(t, &choosing{choose: func(s pickerStream, _ *pickerQuery) error {
		asked <- struct{}{}
		<-s.Context().Done()
		return nil
	}})
	f := startSidecar(t, enginesim.ConnectorVLLMNixl, enginesim.RolePrefill, fleetOptions{config: func(c *config.Config) {
		c.Sidecar.Picker, c.Sidecar.PickerTimeout = address, config.Duration(time.Hour)
	}})
	ctx, leave := context.WithCancel(context.Background())
	gone := make(chan answer, 1)
	go func() { gone <- f.post(ctx, f.url, chatPath, chat(long, 20, true)) }()
	<-asked
	leave()
	<-gone
	f.settled()
	f.cleanupCounted()
}
