package epp

import (
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	filter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/epp/grpcserver"
)

// FuzzFirstMessage: the first message of a gateway, whatever it has, gives a request or a
// refusal. The request has no header line of the picker's own, and its choice is limited if the
// gateway has sent a subset.
func FuzzFirstMessage(f *testing.F) {
	for _, text := range []string{
		`{}`,
		`{"requestHeaders":{"headers":{"headers":[{"key":":method","rawValue":"UE9TVA=="},{"key":":path","value":"/v1/completions?x=1"},{"key":"content-length","value":"12"}]}}}`,
		`{"requestHeaders":{"headers":{"headers":[{"key":":path","value":"\u007f"},{"key":"X_Prefiller_Host_Port","value":"evil"}]},"endOfStream":true}}`,
		`{"requestHeaders":{},"metadataContext":{"filterMetadata":{"envoy.lb.subset_hint":{"x-gateway-destination-endpoint-subset":["10.0.0.1:1",null,{"a":1}]}}}}`,
		`{"requestHeaders":{},"protocolConfig":{"requestBodyMode":"BUFFERED"},"observabilityMode":true}`,
	} {
		m := new(extproc.ProcessingRequest)
		if err := protojson.Unmarshal([]byte(text), m); err != nil {
			f.Fatal(err)
		}
		raw, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	server := New(Options{Registry: engine.New(engine.Options{}), Prefix: func(path string) string { return path[:max(0, strings.LastIndexByte(path, '/'))] }, Ready: func() bool { return true }, Metadata: func() string { return "" }, Log: slog.New(slog.DiscardHandler)})
	f.Fuzz(func(t *testing.T, raw []byte) {
		m := new(incoming)
		if !m.accept(grpcserver.Message{Data: raw}) {
			return
		}
		st := &stream{server: server, ctx: t.Context(), grpc: new(recorder)}
		if st.open(m) != nil {
			return
		}
		r, refusal := st.request(m)
		if refusal != nil {
			if refusal.Status/100 != 4 {
				t.Errorf("refused with %d", refusal.Status)
			}
			return
		}
		for name := range r.Header {
			if ownLine(strings.ToLower(name)) || strings.HasPrefix(name, ":") {
				t.Errorf("the request has a line %q", name)
			}
		}
		if (r.Body == http.NoBody) != m.over {
			t.Errorf("the request has a body: %t", r.Body != http.NoBody)
		}
		if w := st.Within(); st.client.limited && (w.Prefill == nil || w.Decode == nil || w.Whole == nil) {
			t.Error("the choice is not limited to the subset")
		}
	})
}

// TestBodyIsFreed: at the end of the request's body no part of it is in memory, while the stream
// goes on for as long as the answer.
func TestBodyIsFreed(t *testing.T) {
	r := new(recorder)
	for n, text := range []string{"ab", "c", "de"} {
		r.messages = append(r.messages, &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestBody{RequestBody: &extproc.HttpBody{Body: []byte(text), EndOfStream: n == 2}}})
	}
	b := &body{st: &stream{server: &Server{}, ctx: t.Context(), grpc: r, requestMode: filter.ProcessingMode_FULL_DUPLEX_STREAMED}}
	var parts []*incoming
	var text []byte
	for {
		p := make([]byte, 1)
		n, err := b.Read(p)
		if text = append(text, p[:n]...); b.from != nil {
			parts = append(parts, b.from)
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if string(text) != "abcde" || len(parts) != 5 {
		t.Errorf("read %q", text)
	}
	for n, m := range parts {
		if m.body != nil {
			t.Errorf("part %d is in memory", n)
		}
	}
}

// TestReadDeadline: a deadline ends a running read and later ones, until another one is set.
func TestReadDeadline(t *testing.T) {
	grpc := &recorder{arrives: make(chan struct{}, 1)}
	st := &stream{server: &Server{}, ctx: t.Context(), grpc: grpc}
	ended := make(chan error)
	read := func() { _, err := st.nextOfBody(); ended <- err }
	set := func(by time.Time) {
		if err := st.SetReadDeadline(by); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		set(time.Now().Add(time.Hour))
		go read()
		set(time.Unix(1, 0))
		if err := <-ended; err == nil {
			t.Error("the running read has not ended")
		}
		go read()
		if err := <-ended; err == nil {
			t.Error("a later read has not ended")
		}
	}
	set(time.Time{})
	grpc.messages = []*extproc.ProcessingRequest{{}}
	go read()
	if err := <-ended; err != nil {
		t.Errorf("without a deadline: %v", err)
	}
}
