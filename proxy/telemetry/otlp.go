package telemetry

import (
	"cmp"
	"context"
	"fmt"
	"os"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetricgrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
)

// signal is one of OpenTelemetry's signals, as the standard environment variables name it.
type signal string

const (
	traces  signal = "TRACES"
	metrics signal = "METRICS"
)

// wanted reports whether the environment names an endpoint for the signal and disables
// neither the SDK nor the exporter.
func (s signal) wanted() bool {
	named := os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_"+string(s)+"_ENDPOINT") != ""
	return named && os.Getenv("OTEL_SDK_DISABLED") != "true" && os.Getenv("OTEL_"+string(s)+"_EXPORTER") != "none"
}

// The protocols of OTLP.
const (
	protocolHTTP = "http/protobuf"
	protocolGRPC = "grpc"
)

// protocol returns the protocol of the signal. The default is that of the specification.
func (s signal) protocol() (string, error) {
	own := "OTEL_EXPORTER_OTLP_" + string(s) + "_PROTOCOL"
	const common = "OTEL_EXPORTER_OTLP_PROTOCOL"
	p := cmp.Or(os.Getenv(own), os.Getenv(common), protocolHTTP)
	if p != protocolHTTP && p != protocolGRPC {
		if os.Getenv(own) == "" {
			own = common
		}
		return "", fmt.Errorf("%s: must be %q or %q, found %q", own, protocolGRPC, protocolHTTP, p)
	}
	return p, nil
}

// newSpanExporter returns an exporter that the standard variables configure.
func newSpanExporter(ctx context.Context) (sdk.SpanExporter, error) {
	switch p, err := traces.protocol(); {
	case err != nil:
		return nil, err
	case p == protocolGRPC:
		return otlptracegrpc.New(ctx)
	}
	return otlptracehttp.New(ctx)
}

// newMetricExporter returns an exporter that the standard variables configure.
func newMetricExporter(ctx context.Context) (sdkmetric.Exporter, error) {
	switch p, err := metrics.protocol(); {
	case err != nil:
		return nil, err
	case p == protocolGRPC:
		return otlpmetricgrpc.New(ctx)
	}
	return otlpmetrichttp.New(ctx)
}

// Identity describes this process in its exports.
type Identity struct {
	Version  string // of the program
	Instance string // differs between the processes of a fleet
}

// resource returns the resource of the exports: Identity, unless OTEL_SERVICE_NAME and
// OTEL_RESOURCE_ATTRIBUTES name other values.
func (i Identity) resource() (*resource.Resource, error) {
	own := resource.NewSchemaless(
		attribute.String("service.name", "pdproxy"), attribute.String("service.version", i.Version),
		attribute.String("service.instance.id", i.Instance),
	)
	return resource.Merge(own, resource.Environment())
}
