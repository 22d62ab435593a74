package telemetry

import (
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Totals are the present values of the instruments that the dashboard shows. Each value is
// the sum over all labels that its field does not name. All values only grow.
type Totals struct {
	Outcomes  map[string]float64 `json:"outcomes"`   // ended exchanges by outcome
	Tokens    map[string]float64 `json:"tokens"`     // by kind
	LegErrors map[string]float64 `json:"leg_errors"` // by engine
	Retries   float64            `json:"retries"`
	Shed      float64            `json:"shed"`
	Evicted   float64            `json:"evicted"` // running requests that ended for waiting ones
	// Broken counts the streams that ended in an error event, and Continuations, by result, those
	// that broke off while continuation was on.
	Broken        float64            `json:"broken_streams"`
	Continuations map[string]float64 `json:"continuations"`

	FirstToken Buckets `json:"first_token"` // seconds
	InterEvent Buckets `json:"inter_event"` // seconds
}

// Buckets are the buckets of a histogram. Counts[i] is the number of observations up to
// Bounds[i]; the last count, without a bound, is the number of all observations. The zero
// value has no observation.
type Buckets struct {
	Bounds []float64 `json:"bounds"`
	Counts []uint64  `json:"counts"`
}

// Totals reads the instruments. It costs some tens of microseconds: call it for a viewer,
// not for a request.
func (m *Metrics) Totals() Totals {
	return Totals{
		Outcomes: sumBy(m.exchanges, "outcome"), Tokens: sumBy(m.tokens, "kind"), LegErrors: sumBy(m.legErrors, "engine"),
		Retries: sumBy(m.retries, "")[""], Shed: sumBy(m.shed, "")[""], Evicted: sumBy(m.evictions, "")[""],
		Broken: sumBy(m.brokenStreams, "")[""], Continuations: sumBy(m.continuations, "result"),
		FirstToken: sumBuckets(m.firstToken), InterEvent: m.interEvent.buckets(),
	}
}

// read returns the present values of all metrics of c.
func read(c prometheus.Collector) []*dto.Metric {
	ch := make(chan prometheus.Metric, 16)
	go func() {
		defer close(ch)
		c.Collect(ch)
	}()
	var list []*dto.Metric
	for metric := range ch {
		value := new(dto.Metric)
		if metric.Write(value) == nil { // no metric of this package returns an error
			list = append(list, value)
		}
	}
	return list
}

// sumBy returns the sums of the counters or gauges of c by the value of a label, "" without it.
func sumBy(c prometheus.Collector, label string) map[string]float64 {
	sums := make(map[string]float64)
	for _, metric := range read(c) {
		key := ""
		for _, l := range metric.Label {
			if l.GetName() == label {
				key = l.GetValue()
			}
		}
		sums[key] += metric.GetCounter().GetValue() + metric.GetGauge().GetValue()
	}
	return sums
}

// sumBuckets returns the sum of the histograms of c, which have the same bounds.
func sumBuckets(c prometheus.Collector) (b Buckets) {
	for _, metric := range read(c) {
		h := metric.GetHistogram()
		if b.Counts == nil {
			for _, bucket := range h.Bucket {
				b.Bounds = append(b.Bounds, bucket.GetUpperBound())
			}
			b.Counts = make([]uint64, len(b.Bounds)+1)
		}
		for i := range b.Bounds {
			b.Counts[i] += h.Bucket[i].GetCumulativeCount()
		}
		b.Counts[len(b.Bounds)] += h.GetSampleCount()
	}
	return b
}
