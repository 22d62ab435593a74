package operations

import (
	"context"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	collectormetrics "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	collectortrace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	metrics "go.opentelemetry.io/proto/otlp/metrics/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

// receiver is an OTLP receiver. It serves gRPC and HTTP.
type receiver struct {
	collectortrace.UnimplementedTraceServiceServer

	mu       sync.Mutex
	spans    []*trace.Span              // guarded by mu
	metrics  map[string]*metrics.Metric // by name, the last one; guarded by mu
	services map[string]bool            // service names of resources; guarded by mu
	header   []string                   // values of the header line x-tenant; guarded by mu
}

func (r *receiver) Export(ctx context.Context, req *collectortrace.ExportTraceServiceRequest) (*collectortrace.ExportTraceServiceResponse, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	r.addSpans(req, md.Get("x-tenant"))
	return &collectortrace.ExportTraceServiceResponse{}, nil
}

// metricsService has the other method named Export.
type metricsService struct {
	collectormetrics.UnimplementedMetricsServiceServer
	r *receiver
}

func (m metricsService) Export(ctx context.Context, req *collectormetrics.ExportMetricsServiceRequest) (*collectormetrics.ExportMetricsServiceResponse, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	m.r.addMetrics(req, md.Get("x-tenant"))
	return &collectormetrics.ExportMetricsServiceResponse{}, nil
}

func (r *receiver) addSpans(req *collectortrace.ExportTraceServiceRequest, tenant []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.header = append(r.header, tenant...)
	for _, resource := range req.ResourceSpans {
		r.services[attributes(resource.Resource.Attributes)["service.name"]] = true
		for _, scope := range resource.ScopeSpans {
			r.spans = append(r.spans, scope.Spans...)
		}
	}
}

func (r *receiver) addMetrics(req *collectormetrics.ExportMetricsServiceRequest, tenant []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.header = append(r.header, tenant...)
	for _, resource := range req.ResourceMetrics {
		r.services[attributes(resource.Resource.Attributes)["service.name"]] = true
		for _, scope := range resource.ScopeMetrics {
			for _, m := range scope.Metrics {
				r.metrics[m.Name] = m
			}
		}
	}
}

// attributes returns the text and boolean values of a list.
func attributes(list []*common.KeyValue) map[string]string {
	values := map[string]string{}
	for _, a := range list {
		if text, ok := a.Value.Value.(*common.AnyValue_StringValue); ok {
			values[a.Key] = text.StringValue
		} else {
			values[a.Key] = a.Value.String()
		}
	}
	return values
}

func (r *receiver) serveHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	if err != nil || req.Header.Get("Content-Type") != "application/x-protobuf" {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	switch req.URL.Path {
	case "/v1/traces":
		var in collectortrace.ExportTraceServiceRequest
		if err = proto.Unmarshal(body, &in); err == nil {
			r.addSpans(&in, req.Header["X-Tenant"])
		}
	case "/v1/metrics":
		var in collectormetrics.ExportMetricsServiceRequest
		if err = proto.Unmarshal(body, &in); err == nil {
			r.addMetrics(&in, req.Header["X-Tenant"])
		}
	default:
		w.WriteHeader(http.StatusNotFound)
		return
	}
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/x-protobuf") // an empty message
}

// listen starts a receiver for that protocol and returns its URL.
func listen(t *testing.T, protocol string) (*receiver, string) {
	t.Helper()
	r := &receiver{metrics: map[string]*metrics.Metric{}, services: map[string]bool{}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if protocol == "grpc" {
		s := grpc.NewServer()
		collectortrace.RegisterTraceServiceServer(s, r)
		collectormetrics.RegisterMetricsServiceServer(s, metricsService{r: r})
		go func() { _ = s.Serve(l) }() // returns after Stop
		t.Cleanup(s.Stop)
	} else {
		s := &http.Server{Handler: http.HandlerFunc(r.serveHTTP)}
		go func() { _ = s.Serve(l) }() // returns after Close
		t.Cleanup(func() { s.Close() })
	}
	return r, "http://" + l.Addr().String()
}

// TestOTLP: the standard variables make the proxy export spans and metrics, in the terms of
// the conventions for generative AI.
func TestOTLP(t *testing.T) {
	for _, tt := range []struct {
		name, protocol string
		env            func(url string) []string
		workers        string
		spans, metrics bool
	}{
		{"HTTP by default", "http", func(url string) []string { return []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + url} }, "", true, true},
		{"gRPC", "grpc", func(url string) []string {
			return []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + url, "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"}
		}, "", true, true},
		{"gRPC of a fleet", "grpc", func(url string) []string {
			return []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + url, "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"}
		}, "[fleet]\nworkers = 1\n", true, true},
		{"only metrics, over gRPC", "grpc", func(url string) []string {
			return []string{"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=" + url, "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL=grpc"}
		}, "", false, true},
		{"only spans, over HTTP", "http", func(url string) []string {
			return []string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=" + url + "/v1/traces", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf"}
		}, "", true, false},
		{"metrics switched off", "http", func(url string) []string {
			return []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + url, "OTEL_METRICS_EXPORTER=none"}
		}, "", true, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, url := listen(t, tt.protocol)
			env := append(tt.env(url), "OTEL_EXPORTER_OTLP_HEADERS=x-tenant=blue", "OTEL_METRIC_EXPORT_INTERVAL=200", "OTEL_BSP_SCHEDULE_DELAY=100")
			_, lines := engines(t, "vllm-nixl", map[string][]string{"p0": nil, "d0": nil})
			p := run(t, env, tt.workers+lines, "")
			p.ready(t)
			for range 5 {
				if status := p.complete(30, true); status != 200 {
					t.Fatalf("got status %d", status)
				}
			}
			if tt.spans {
				r.checkSpans(t)
			}
			if tt.metrics {
				r.checkMetrics(t)
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			if (len(r.spans) > 0) != tt.spans || (len(r.metrics) > 0) != tt.metrics {
				t.Errorf("got %d spans and %d metrics", len(r.spans), len(r.metrics))
			}
			if !r.services["pdproxy"] || len(r.services) != 1 || !slices.Contains(r.header, "blue") {
				t.Errorf("services %v, header lines %v", r.services, r.header)
			}
		})
	}
}

// checkSpans waits for the span of a request in the terms of the conventions.
func (r *receiver) checkSpans(t *testing.T) {
	t.Helper()
	var found *trace.Span
	eventually(t, "the span of an operation", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, s := range r.spans {
			if s.Name == "text_completion sim" {
				found = s
			}
		}
		return found != nil
	})
	a := attributes(found.Attributes)
	if found.Kind != trace.Span_SPAN_KIND_CLIENT || a["gen_ai.operation.name"] != "text_completion" || a["gen_ai.provider.name"] != "pdproxy" ||
		a["gen_ai.request.model"] != "sim" || !strings.Contains(a["gen_ai.request.stream"], "true") || a["gen_ai.response.time_to_first_chunk"] == "" {
		t.Errorf("span %v with %v", found.Kind, a)
	}
	for key, value := range a {
		if strings.Contains(value, "word word") {
			t.Errorf("%s has the text of the prompt", key)
		}
	}
}

// checkMetrics waits for the metrics of the conventions and for those of Prometheus.
func (r *receiver) checkMetrics(t *testing.T) {
	t.Helper()
	want := []string{"gen_ai.server.request.duration", "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token", "gen_ai.client.token.usage", "pdproxy_exchanges_total"}
	for _, name := range want {
		eventually(t, name, func() bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.metrics[name] != nil
		})
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	duration := r.metrics["gen_ai.server.request.duration"]
	points := duration.GetHistogram().GetDataPoints()
	if duration.Unit != "s" || len(points) == 0 {
		t.Fatalf("unit %q, %d points", duration.Unit, len(points))
	}
	a := attributes(points[0].Attributes)
	if a["gen_ai.operation.name"] != "text_completion" || a["gen_ai.provider.name"] != "pdproxy" || a["gen_ai.request.model"] != "sim" {
		t.Errorf("attributes %v", a)
	}
	types := map[string]bool{}
	for _, point := range r.metrics["gen_ai.client.token.usage"].GetHistogram().GetDataPoints() {
		types[attributes(point.Attributes)["gen_ai.token.type"]] = true
	}
	if !types["input"] || !types["output"] || len(types) != 2 {
		t.Errorf("token types %v", types)
	}
}

// TestOTLPProtocol: a protocol that the proxy does not have is an error that names the
// variable.
func TestOTLPProtocol(t *testing.T) {
	for _, variable := range []string{"OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"} {
		p := run(t, []string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:1", variable + "=http/json"}, "", "")
		<-p.done
		if p.cmd.ProcessState.ExitCode() == 0 || !strings.Contains(p.out.String(), variable) {
			t.Errorf("%s: exit status %d: %s", variable, p.cmd.ProcessState.ExitCode(), p.out.String())
		}
	}
}
