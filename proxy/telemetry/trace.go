package telemetry

import (
	"context"
	"net/http"
	"os"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Tracer makes one span for each exchange. A nil Tracer and a nil Span do nothing and
// cost nothing. Spans are built from the exchange's record at its end. Only the ids
// exist before, because engines receive them.
type Tracer struct {
	provider *sdk.TracerProvider
	tracer   trace.Tracer
}

// NewTracer returns a tracer that exports by OTLP over HTTP, as configured by the
// standard environment variables. It returns nil if they name no endpoint or disable the
// SDK (OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER=none). Sampling follows
// OTEL_TRACES_SAMPLER. Close flushes it.
func NewTracer(ctx context.Context) (*Tracer, error) {
	named := os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != ""
	if !named || os.Getenv("OTEL_SDK_DISABLED") == "true" || os.Getenv("OTEL_TRACES_EXPORTER") == "none" {
		return nil, nil
	}
	exp, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, err
	}
	return NewTracerTo(sdk.WithBatcher(exp)), nil
}

// NewTracerTo returns a tracer with that export, for tests and embedders.
func NewTracerTo(export sdk.TracerProviderOption) *Tracer {
	p := sdk.NewTracerProvider(export)
	return &Tracer{provider: p, tracer: p.Tracer("github.com/pdproxy/pdproxy")}
}

// Close flushes and ends the export.
func (t *Tracer) Close(ctx context.Context) error {
	if t == nil {
		return nil
	}
	return t.provider.Shutdown(ctx)
}

// Span is the span of one exchange.
type Span struct {
	ctx    context.Context
	tracer trace.Tracer
	span   trace.Span
}

// w3c carries traceparent, tracestate and baggage.
var w3c = propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})

// Start begins the span of a request with these header lines. It returns nil if the
// request is not sampled.
func (t *Tracer) Start(h http.Header, at time.Time) *Span {
	if t == nil {
		return nil
	}
	ctx := w3c.Extract(context.Background(), propagation.HeaderCarrier(h))
	ctx, span := t.tracer.Start(ctx, "pdproxy.exchange", trace.WithTimestamp(at), trace.WithSpanKind(trace.SpanKindServer))
	if !span.IsRecording() {
		return nil
	}
	return &Span{ctx: ctx, tracer: t.tracer, span: span}
}

// Inject calls set for each header line that passes the span to an engine. A nil span
// calls nothing, so that the client's own lines are kept.
func (s *Span) Inject(set func(name, value string)) {
	if s == nil {
		return
	}
	carrier := propagation.MapCarrier{}
	w3c.Inject(s.ctx, carrier)
	for k, v := range carrier {
		set(k, v)
	}
}

// Child adds a child span that has already ended. With a zero time it adds nothing.
func (s *Span) Child(name string, start, end time.Time, attrs ...attribute.KeyValue) {
	if s == nil || start.IsZero() || end.IsZero() || end.Before(start) {
		return
	}
	_, c := s.tracer.Start(s.ctx, name, trace.WithTimestamp(start), trace.WithAttributes(attrs...))
	c.End(trace.WithTimestamp(end))
}

// End ends the exchange's span.
func (s *Span) End(at time.Time, o Outcome, attrs ...attribute.KeyValue) {
	if s == nil {
		return
	}
	s.span.SetAttributes(attrs...)
	s.span.SetAttributes(attribute.String("pdproxy.outcome", o.String()))
	if o != OutcomeOK {
		s.span.SetStatus(codes.Error, o.String())
	}
	s.span.End(trace.WithTimestamp(at))
}
