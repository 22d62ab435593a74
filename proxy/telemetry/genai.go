package telemetry

import (
	"context"
	"errors"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	bridge "go.opentelemetry.io/contrib/bridges/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
)

// scope is the instrumentation scope of spans and metrics.
const scope = "github.com/pdproxy/pdproxy"

// Provider is the value of gen_ai.provider.name. The engines behind the proxy are no
// provider that the conventions list.
const Provider = "pdproxy"

// Pusher exports metrics by OTLP. It is safe for concurrent use.
type Pusher struct {
	provider  *sdkmetric.MeterProvider
	duration  metric.Float64Histogram
	firstByte metric.Float64Histogram
	perToken  metric.Float64Histogram
	tokens    metric.Int64Histogram
	sets      sync.Map // of metric.MeasurementOption by setKey; forget removes those of a model
}

// setKey identifies a set of attributes.
type setKey struct {
	operation, model string
	outcome          Outcome
	tokens           string // "": no token type
}

// forget removes the attributes of a model that no engine serves.
func (p *Pusher) forget(model string) {
	p.sets.Range(func(key, _ any) bool {
		if key.(setKey).model == model {
			p.sets.Delete(key)
		}
		return true
	})
}

// NewPusher returns a Pusher that exports the metrics of the conventions for generative AI
// and those of all, as the standard environment variables say. all may be nil. NewPusher
// returns nil if the variables name no endpoint for metrics or disable them. The interval
// is OTEL_METRIC_EXPORT_INTERVAL, 60 s by default. Close flushes it.
func NewPusher(ctx context.Context, id Identity, all prometheus.Gatherer) (*Pusher, error) {
	if !metrics.wanted() {
		return nil, nil
	}
	exporter, err := newMetricExporter(ctx)
	if err != nil {
		return nil, err
	}
	var options []sdkmetric.PeriodicReaderOption
	if all != nil {
		options = append(options, sdkmetric.WithProducer(bridge.NewMetricProducer(bridge.WithGatherer(all))))
	}
	return NewPusherTo(sdkmetric.NewPeriodicReader(exporter, options...), id)
}

// The bounds that the conventions recommend.
var (
	durationBounds  = []float64{.01, .02, .04, .08, .16, .32, .64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92}
	firstByteBounds = []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10}
	perTokenBounds  = []float64{.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5}
	tokenBounds     = []float64{1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864}
)

// NewPusherTo returns a Pusher with that reader, for tests and embedders.
func NewPusherTo(reader sdkmetric.Reader, id Identity) (*Pusher, error) {
	about, err := id.resource()
	if err != nil {
		return nil, err
	}
	p := &Pusher{provider: sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader), sdkmetric.WithResource(about))}
	meter := p.provider.Meter(scope)
	var errs [4]error
	seconds := func(name, text string, bounds []float64, err *error) metric.Float64Histogram {
		h, failed := meter.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(text), metric.WithExplicitBucketBoundaries(bounds...))
		*err = failed
		return h
	}
	p.duration = seconds("gen_ai.server.request.duration", "Time from a request's head to the end of its answer.", durationBounds, &errs[0])
	p.firstByte = seconds("gen_ai.server.time_to_first_token", "Time from a request's head to the first byte of its stream.", firstByteBounds, &errs[1])
	p.perToken = seconds("gen_ai.server.time_per_output_token", "Time per token of a stream after the first one.", perTokenBounds, &errs[2])
	p.tokens, errs[3] = meter.Int64Histogram("gen_ai.client.token.usage", metric.WithUnit("{token}"),
		metric.WithDescription("Tokens of prompts and answers, as the engines reported them."), metric.WithExplicitBucketBoundaries(tokenBounds...))
	return p, errors.Join(errs[:]...)
}

// Record adds an exchange that has ended to the metrics. An exchange without an operation is left
// out.
func (p *Pusher) Record(e *Exchange) {
	if e.Operation == "" {
		return
	}
	ctx := context.Background()
	key := setKey{operation: e.Operation, model: e.Model, outcome: e.Outcome}
	p.duration.Record(ctx, e.Duration.Seconds(), p.set(key))
	key.outcome = OutcomeOK
	if e.Outcome == OutcomeOK && e.Stream && e.FirstByte > 0 {
		p.firstByte.Record(ctx, e.FirstByte.Seconds(), p.set(key))
		if e.Completion > 1 {
			p.perToken.Record(ctx, (e.Duration-e.FirstByte).Seconds()/float64(e.Completion-1), p.set(key))
		}
	}
	if e.Prompt > 0 {
		key.tokens = "input"
		p.tokens.Record(ctx, e.Prompt, p.set(key))
	}
	if e.Completion > 0 {
		key.tokens = "output"
		p.tokens.Record(ctx, e.Completion, p.set(key))
	}
}

// set returns the attributes of key.
func (p *Pusher) set(key setKey) metric.MeasurementOption {
	if known, ok := p.sets.Load(key); ok {
		return known.(metric.MeasurementOption)
	}
	list := genAI(key.operation, key.model)
	if key.outcome != OutcomeOK {
		list = append(list, attribute.String("error.type", key.outcome.String()))
	}
	if key.tokens != "" {
		list = append(list, attribute.String("gen_ai.token.type", key.tokens))
	}
	made := metric.WithAttributeSet(attribute.NewSet(list...))
	p.sets.Store(key, made)
	return made
}

// genAI returns the attributes that spans and metrics of an operation have in common.
func genAI(operation, model string) []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.String("gen_ai.operation.name", operation), attribute.String("gen_ai.provider.name", Provider),
		attribute.String("gen_ai.request.model", model),
	}
}

// Close exports the remaining data and ends the export. On a nil Pusher it does nothing.
func (p *Pusher) Close(ctx context.Context) error {
	if p == nil {
		return nil
	}
	return p.provider.Shutdown(ctx)
}
