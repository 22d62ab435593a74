package telemetry

import (
	"context"
	"net/http"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Tracer makes one span for each exchange. Spans are built from the exchange's record at its end. Only the ids
// exist before, because engines receive them.
type Tracer struct {
	provider *sdk.TracerProvider
	tracer   trace.Tracer
}

// NewTracer returns a tracer that exports by OTLP, over gRPC or HTTP, as configured by the
// standard environment variables. It returns nil if they name no endpoint or disable the
// SDK (OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER=none). Sampling follows
// OTEL_TRACES_SAMPLER. Close flushes it.
func NewTracer(ctx context.Context, id Identity) (*Tracer, error) {
	if !traces.wanted() {
		return nil, nil
	}
	exp, err := newSpanExporter(ctx)
	if err != nil {
		return nil, err
	}
	about, err := id.resource()
	if err != nil {
		return nil, err
	}
	return NewTracerTo(sdk.WithBatcher(exp), sdk.WithResource(about)), nil
}

// NewTracerTo returns a tracer with that export, for tests and embedders.
func NewTracerTo(options ...sdk.TracerProviderOption) *Tracer {
	p := sdk.NewTracerProvider(options...)
	return &Tracer{provider: p, tracer: p.Tracer(scope)}
}

// Close flushes and ends the export. On a nil Tracer it does nothing.
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
	ctx := w3c.Extract(context.Background(), propagation.HeaderCarrier(h))
	ctx, span := t.tracer.Start(ctx, "pdproxy.exchange", trace.WithTimestamp(at), trace.WithSpanKind(trace.SpanKindServer))
	if !span.IsRecording() {
		return nil
	}
	return &Span{ctx: ctx, tracer: t.tracer, span: span}
}

// Inject calls set for each header line that passes the span to an engine.
func (s *Span) Inject(set func(name, value string)) {
	carrier := propagation.MapCarrier{}
	w3c.Inject(s.ctx, carrier)
	for k, v := range carrier {
		set(k, v)
	}
}

// Child adds a child span that has already ended. With a zero time it adds nothing.
func (s *Span) Child(name string, start, end time.Time, attrs ...attribute.KeyValue) {
	if start.IsZero() || end.IsZero() || end.Before(start) {
		return
	}
	_, c := s.tracer.Start(s.ctx, name, trace.WithTimestamp(start), trace.WithAttributes(attrs...))
	c.End(trace.WithTimestamp(end))
}

// Answered returns the attributes of the answer: gen_ai.response.model, a string, and
// gen_ai.response.finish_reasons, a list of strings. An attribute without a value is left out.
func (e *Exchange) Answered() []attribute.KeyValue {
	var list []attribute.KeyValue
	if e.AnsweredModel != "" {
		list = append(list, attribute.String("gen_ai.response.model", e.AnsweredModel))
	}
	if len(e.FinishReasons) > 0 {
		list = append(list, attribute.StringSlice("gen_ai.response.finish_reasons", e.FinishReasons))
	}
	return list
}

// Operation adds the child span of a request in the terms of OpenTelemetry's conventions for
// generative AI: a call of the engines, from start to the end of the request.
func (s *Span) Operation(e *Exchange, start, end time.Time, attrs ...attribute.KeyValue) {
	if e.Operation == "" || end.Before(start) {
		return
	}
	_, c := s.tracer.Start(s.ctx, e.Operation+" "+e.Model, trace.WithTimestamp(start), trace.WithSpanKind(trace.SpanKindClient),
		trace.WithAttributes(genAI(e.Operation, e.Model)...), trace.WithAttributes(attrs...))
	c.SetAttributes(attribute.Bool("gen_ai.request.stream", e.Stream))
	if e.Stream && e.FirstByte > 0 {
		c.SetAttributes(attribute.Float64("gen_ai.response.time_to_first_chunk", e.FirstByte.Seconds()))
	}
	if e.Prompt > 0 {
		c.SetAttributes(attribute.Int64("gen_ai.usage.input_tokens", e.Prompt))
	}
	if e.Completion > 0 {
		c.SetAttributes(attribute.Int64("gen_ai.usage.output_tokens", e.Completion))
	}
	if e.Outcome != OutcomeOK {
		c.SetAttributes(attribute.String("error.type", e.Outcome.String()))
		c.SetStatus(codes.Error, e.Outcome.String())
	}
	c.End(trace.WithTimestamp(end))
}

// End ends the exchange's span.
func (s *Span) End(at time.Time, o Outcome, attrs ...attribute.KeyValue) {
	s.span.SetAttributes(attrs...)
	s.span.SetAttributes(attribute.String("pdproxy.outcome", o.String()))
	if o != OutcomeOK {
		s.span.SetStatus(codes.Error, o.String())
	}
	s.span.End(trace.WithTimestamp(at))
}
