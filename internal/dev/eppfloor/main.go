// Command eppfloor is the least endpoint picker that grpc-go and go-control-plane allow: it
// answers the messages of a gateway with one fixed endpoint and does nothing else. Its CPU time
// is the floor for each picker that speaks ext_proc by these libraries. With the flag -bytes it
// uses neither go-control-plane nor protobuf, and answers with prepared bytes in the fewest messages
// that a gateway accepts, so its CPU time is the floor of grpc-go alone. It has the windows and the
// pace of the garbage collection of pdproxy.
package main

import (
	"flag"
	"io"
	"log"
	"net"
	"os"
	"runtime"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

const headerDestination = "x-gateway-destination-endpoint"

func main() {
	listen := flag.String("listen", "127.0.0.1:0", "address for gateways")
	endpoint := flag.String("endpoint", "", "address of the engine of all requests")
	bytes := flag.Bool("bytes", false, "answer with prepared bytes, without protobuf")
	flag.Parse()
	if os.Getenv("GOGC") == "" {
		ballast := make([]byte, 8<<20) // as pdproxy
		defer runtime.KeepAlive(ballast)
	}
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		log.Fatal(err)
	}
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(64 << 20), grpc.InitialWindowSize(1 << 20), grpc.InitialConnWindowSize(16 << 20),
		grpc.ReadBufferSize(128 << 10), grpc.WriteBufferSize(128 << 10), grpc.NumStreamWorkers(32),
	}
	if *bytes {
		options = append(options, grpc.ForceServerCodecV2(codec{}))
	}
	s := grpc.NewServer(options...)
	if *bytes {
		decision, err := proto.Marshal((&decoded{endpoint: *endpoint}).decision())
		if err != nil {
			log.Fatal(err)
		}
		s.RegisterService(&grpc.ServiceDesc{ServiceName: extproc.ExternalProcessor_ServiceDesc.ServiceName, HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{
			{StreamName: "Process", Handler: prepared(decision).process, ServerStreams: true, ClientStreams: true},
		}}, nil)
	} else {
		extproc.RegisterExternalProcessorServer(s, &decoded{endpoint: *endpoint})
	}
	h := health.NewServer()
	h.SetServingStatus(extproc.ExternalProcessor_ServiceDesc.ServiceName, grpc_health_v1.HealthCheckResponse_SERVING)
	grpc_health_v1.RegisterHealthServer(s, h)
	log.Fatal(s.Serve(l))
}

// decoded answers with the types of go-control-plane.
type decoded struct {
	extproc.UnimplementedExternalProcessorServer
	endpoint string
}

// Process implements extproc.ExternalProcessorServer.
func (d *decoded) Process(g extproc.ExternalProcessor_ProcessServer) error {
	for {
		m, err := g.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := g.Send(d.answer(m)); err != nil {
			return err
		}
	}
}

func (d *decoded) answer(m *extproc.ProcessingRequest) *extproc.ProcessingResponse {
	switch {
	case m.GetRequestHeaders() != nil:
		return d.decision()
	case m.GetRequestBody() != nil:
		return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestBody{RequestBody: streamed(m.GetRequestBody())}}
	case m.GetRequestTrailers() != nil:
		return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestTrailers{RequestTrailers: &extproc.TrailersResponse{}}}
	case m.GetResponseHeaders() != nil:
		return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extproc.HeadersResponse{}}}
	case m.GetResponseBody() != nil:
		return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseBody{ResponseBody: streamed(m.GetResponseBody())}}
	}
	return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extproc.TrailersResponse{}}}
}

// decision is the answer to the headers of a request.
func (d *decoded) decision() *extproc.ProcessingResponse {
	return &extproc.ProcessingResponse{
		DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{"envoy.lb": structpb.NewStructValue(&structpb.Struct{
			Fields: map[string]*structpb.Value{headerDestination: structpb.NewStringValue(d.endpoint)},
		})}},
		Response: &extproc.ProcessingResponse_RequestHeaders{RequestHeaders: &extproc.HeadersResponse{Response: &extproc.CommonResponse{
			ClearRouteCache: true,
			HeaderMutation: &extproc.HeaderMutation{SetHeaders: []*core.HeaderValueOption{{
				Header: &core.HeaderValue{Key: headerDestination, RawValue: []byte(d.endpoint)}, AppendAction: core.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
			}}},
		}}},
	}
}

// streamed returns a part of a body to the gateway.
func streamed(b *extproc.HttpBody) *extproc.BodyResponse {
	return &extproc.BodyResponse{Response: &extproc.CommonResponse{BodyMutation: &extproc.BodyMutation{
		Mutation: &extproc.BodyMutation_StreamedResponse{StreamedResponse: &extproc.StreamedBodyResponse{Body: b.GetBody(), EndOfStream: b.GetEndOfStream()}},
	}}}
}
