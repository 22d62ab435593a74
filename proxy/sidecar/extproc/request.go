package extproc

import (
	"strconv"
	"strings"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	service "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Request is a request as the picker sees it. The body must not change until Pick has returned.
type Request struct {
	Method, Scheme, Authority, Path string
	Header                          []upstream.Field
	Body                            []byte
	Trailer                         []upstream.Field
	// Subset lists the endpoints from which the picker may choose. nil: all.
	Subset []string
	// Reserve counts memory for a body that the picker has changed, in bytes. The error ends
	// the stream. Pick calls it from another goroutine, and no more after it has returned. nil:
	// not counted.
	Reserve func(n int) error
}

// headMessage is the first message of a stream.
func headMessage(r *Request) *service.ProcessingRequest {
	lines := make([]*core.HeaderValue, 0, len(r.Header)+5)
	for _, l := range [...]upstream.Field{{Name: ":method", Value: r.Method}, {Name: ":scheme", Value: r.Scheme}, {Name: ":authority", Value: r.Authority}, {Name: ":path", Value: r.Path}} {
		lines = append(lines, headerValue(l.Name, l.Value))
	}
	for _, l := range r.Header {
		lines = append(lines, headerValue(l.Name, l.Value))
	}
	lines = append(lines, headerValue("content-length", strconv.Itoa(len(r.Body))))
	m := &service.ProcessingRequest{
		Request: &service.ProcessingRequest_RequestHeaders{RequestHeaders: &service.HttpHeaders{
			Headers: &core.HeaderMap{Headers: lines}, EndOfStream: len(r.Body) == 0 && len(r.Trailer) == 0,
		}},
		ProtocolConfig: &service.ProtocolConfiguration{
			RequestBodyMode: filter.ProcessingMode_FULL_DUPLEX_STREAMED, ResponseBodyMode: filter.ProcessingMode_FULL_DUPLEX_STREAMED,
		},
	}
	if r.Subset != nil {
		list := make([]*structpb.Value, len(r.Subset))
		for i, endpoint := range r.Subset {
			list[i] = structpb.NewStringValue(endpoint)
		}
		m.MetadataContext = metadata(SubsetSpace, SubsetKey, structpb.NewListValue(&structpb.ListValue{Values: list}))
	}
	return m
}

// bodyMessage is a part of the request's body.
func bodyMessage(part []byte, over bool) *service.ProcessingRequest {
	return &service.ProcessingRequest{Request: &service.ProcessingRequest_RequestBody{RequestBody: &service.HttpBody{Body: part, EndOfStream: over}}}
}

// trailerMessage ends a request with trailers.
func trailerMessage(lines []upstream.Field) *service.ProcessingRequest {
	m := &core.HeaderMap{}
	for _, l := range lines {
		m.Headers = append(m.Headers, headerValue(l.Name, l.Value))
	}
	return &service.ProcessingRequest{Request: &service.ProcessingRequest_RequestTrailers{RequestTrailers: &service.HttpTrailers{Trailers: m}}}
}

// answerHeadMessage is the head of the answer. served is the endpoint that has answered; "" if
// none has.
func answerHeadMessage(status int, lines []upstream.Field, served string) *service.ProcessingRequest {
	values := make([]*core.HeaderValue, 0, len(lines)+1)
	values = append(values, headerValue(":status", strconv.Itoa(status)))
	for _, l := range lines {
		values = append(values, headerValue(l.Name, l.Value))
	}
	m := &service.ProcessingRequest{Request: &service.ProcessingRequest_ResponseHeaders{ResponseHeaders: &service.HttpHeaders{Headers: &core.HeaderMap{Headers: values}}}}
	if served != "" {
		m.MetadataContext = metadata(LBSpace, ServedKey, structpb.NewStringValue(served))
	}
	return m
}

// answerBodyMessage is a part of the answer's body.
func answerBodyMessage(part []byte, over bool) *service.ProcessingRequest {
	return &service.ProcessingRequest{Request: &service.ProcessingRequest_ResponseBody{ResponseBody: &service.HttpBody{Body: part, EndOfStream: over}}}
}

// headerValue is a header line as Envoy sends it: the name in lower case, the value as bytes.
func headerValue(name, value string) *core.HeaderValue {
	return &core.HeaderValue{Key: strings.ToLower(name), RawValue: []byte(value)}
}

func metadata(space, key string, value *structpb.Value) *core.Metadata {
	return &core.Metadata{FilterMetadata: map[string]*structpb.Struct{space: {Fields: map[string]*structpb.Value{key: value}}}}
}
