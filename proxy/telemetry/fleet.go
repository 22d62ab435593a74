package telemetry

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
)

// WireFormat is the format of a process's metrics for a Fleet, as an Accept header.
const WireFormat = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"

// Process is the answer of one process of a fleet.
type Process struct {
	Name   string // value of the label process, for metrics that cannot be added up
	Text   []byte // its metrics in WireFormat
	Failed bool   // the worker did not answer
}

// ownProcess is the Name of the gathering process.
const ownProcess = "coordinator"

// Fleet is a Gatherer that shows the metrics of all processes as those of one. Fleet adds
// up counters, histograms and gauges, except those that only the coordinator has. Metrics
// about a process itself get a label process.
//
// A sum must not fall because a process has ended or does not answer: the last counters
// and histograms of such a process are kept. Safe for concurrent use.
type Fleet struct {
	own prometheus.Gatherer
	ask func() []Process

	mu    sync.Mutex
	known map[string]*remembered // keyed by the process's name and start time; guarded by mu
	past  families               // of processes that were dropped; guarded by mu
}

// remembered holds the counters and histograms of a process.
type remembered struct {
	families
	seen time.Time
}

type families map[string]*dto.MetricFamily

// maxKnown bounds the number of processes that are remembered separately.
const maxKnown = 256

// NewFleet returns a Gatherer for the metrics of own and of the processes that ask
// returns.
func NewFleet(own prometheus.Gatherer, ask func() []Process) *Fleet {
	return &Fleet{own: own, ask: ask, known: map[string]*remembered{}, past: families{}}
}

// ofCoordinator lists the gauges that only the coordinator shows: workers have separate
// or partial values.
var ofCoordinator = map[string]bool{
	"pdproxy_leases_open": true, "pdproxy_engine_load": true, "pdproxy_engine_up": true, "pdproxy_pair_state": true, "pdproxy_pair_refused": true,
	"pdproxy_kv_index_blocks": true, "pdproxy_kv_index_bytes": true, "pdproxy_kv_distrust": true,
	"pdproxy_role_engines_ready": true, "pdproxy_role_requests_running": true, "pdproxy_role_requests_waiting": true, "pdproxy_role_saturation_seconds": true,
	"pdproxy_build_info":            true,
	"pdproxy_pool_objects":          true,
	"pdproxy_config_reload_success": true, "pdproxy_config_reload_timestamp_seconds": true,
}

// startTime is the start time of a process. It distinguishes two processes with the
// same name.
const startTime = "process_start_time_seconds"

// Gather implements prometheus.Gatherer. With an error it also returns the families
// that it could gather.
func (f *Fleet) Gather() ([]*dto.MetricFamily, error) {
	own, failed := f.own.Gather() // on an error the gathered families still count
	answers := f.ask()
	t := total{}
	for _, family := range own {
		t.add(family, ownProcess, true)
	}
	silent, now := 0, time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range answers {
		list, err := decode(p.Text)
		if p.Failed || err != nil {
			silent++
			continue
		}
		mem := &remembered{families{}, now}
		for _, family := range list {
			if !ofCoordinator[family.GetName()] {
				t.add(family, p.Name, true)
			}
			if adds(family) {
				mem.families[family.GetName()] = family
			}
		}
		f.known[p.Name+" "+started(list)] = mem
	}
	f.recall(t, now)
	t.gauge("pdproxy_fleet_workers", "Workers that are connected to the coordinator.", float64(len(answers)))
	t.gauge("pdproxy_fleet_silent_workers", "Workers that did not send their metrics in time; their counters keep the last known values.", float64(silent))
	return t.families(), failed
}

// recall adds the stored metrics of processes that did not answer now. If there are too
// many such processes, recall merges those that have been silent longest into the sum.
// The caller holds f.mu.
func (f *Fleet) recall(t total, now time.Time) {
	away := slices.Collect(maps.Keys(f.known))
	away = slices.DeleteFunc(away, func(key string) bool { return f.known[key].seen.Equal(now) })
	slices.SortFunc(away, func(a, b string) int { return cmp.Or(f.known[a].seen.Compare(f.known[b].seen), strings.Compare(a, b)) })
	if more := len(f.known) - maxKnown; more > 0 {
		sum := total{}
		for _, family := range f.past {
			sum.add(family, "", false)
		}
		for _, key := range away[:min(more, len(away))] {
			for _, family := range f.known[key].families {
				sum.add(family, "", false)
			}
			delete(f.known, key)
		}
		away = away[min(more, len(away)):]
		for _, family := range sum.families() {
			f.past[family.GetName()] = family
		}
	}
	for _, family := range f.past {
		t.add(family, "", false)
	}
	for _, key := range away {
		for _, family := range f.known[key].families {
			t.add(family, "", false)
		}
	}
}

// decode reads WireFormat.
func decode(text []byte) (list []*dto.MetricFamily, err error) {
	d := expfmt.NewDecoder(bytes.NewReader(text), expfmt.NewFormat(expfmt.TypeProtoDelim))
	for {
		family := new(dto.MetricFamily)
		switch err := d.Decode(family); {
		case errors.Is(err, io.EOF):
			return list, nil
		case err != nil:
			return nil, fmt.Errorf("decode metrics: %w", err)
		}
		list = append(list, family)
	}
}

// started returns the start time of the process with these metrics, or "".
func started(list []*dto.MetricFamily) string {
	for _, family := range list {
		if family.GetName() == startTime && len(family.Metric) == 1 {
			return fmt.Sprint(family.Metric[0].GetGauge().GetValue())
		}
	}
	return ""
}

// adds reports whether a family's values only grow and are not about the process
// itself.
func adds(f *dto.MetricFamily) bool {
	return !aboutProcess(f.GetName()) && (f.GetType() == dto.MetricType_COUNTER || f.GetType() == dto.MetricType_HISTOGRAM)
}

// aboutProcess reports whether a family is about the process and its runtime.
func aboutProcess(name string) bool {
	for _, prefix := range [...]string{"go_", "process_", "promhttp_", "pdproxy_worker_"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// total is the sum of several processes' families, by name.
type total map[string]*sum

// sum is a family and its metrics by their labels.
type sum struct {
	family *dto.MetricFamily
	at     map[string]*dto.Metric
}

// add adds a family and keeps nothing of it. It skips a family whose type differs from
// that of the family with the same name, and skips gauges if live is false.
func (t total) add(f *dto.MetricFamily, process string, live bool) {
	own := aboutProcess(f.GetName())
	if !live && !adds(f) {
		return
	}
	s := t[f.GetName()]
	if s == nil {
		s = &sum{family: &dto.MetricFamily{Name: f.Name, Help: f.Help, Type: f.Type}, at: map[string]*dto.Metric{}}
		t[f.GetName()] = s
	}
	if s.family.GetType() != f.GetType() {
		return
	}
	for _, m := range f.Metric {
		labels := m.Label
		if own {
			labels = append(slices.Clone(labels), label("process", process))
			slices.SortFunc(labels, func(a, b *dto.LabelPair) int { return strings.Compare(a.GetName(), b.GetName()) })
		}
		key := labelKey(labels)
		to := s.at[key]
		if to == nil {
			to = &dto.Metric{Label: labels}
			s.at[key] = to
			s.family.Metric = append(s.family.Metric, to)
		} else if own {
			continue // an ended process and its successor
		}
		addMetric(to, m)
	}
}

func label(name, value string) *dto.LabelPair { return &dto.LabelPair{Name: &name, Value: &value} }

func labelKey(labels []*dto.LabelPair) string {
	var b strings.Builder
	for _, l := range labels {
		fmt.Fprintf(&b, "%q=%q,", l.GetName(), l.GetValue())
	}
	return b.String()
}

// addMetric adds the value of m.
func addMetric(to, m *dto.Metric) {
	switch {
	case m.Counter != nil:
		v := to.GetCounter().GetValue() + m.Counter.GetValue()
		to.Counter = &dto.Counter{Value: &v}
	case m.Gauge != nil:
		v := to.GetGauge().GetValue() + m.Gauge.GetValue()
		to.Gauge = &dto.Gauge{Value: &v}
	case m.Summary != nil: // metrics of one process, which have the label process
		to.Summary = m.Summary
	case m.Histogram != nil:
		to.Histogram = addHistograms(to.Histogram, m.Histogram)
	}
}

// addHistograms adds two histograms; a may be nil. Buckets that only one of them has
// are dropped: an older version may have had others.
func addHistograms(a, b *dto.Histogram) *dto.Histogram {
	count, total := a.GetSampleCount()+b.GetSampleCount(), a.GetSampleSum()+b.GetSampleSum()
	h := &dto.Histogram{SampleCount: &count, SampleSum: &total}
	if a == nil {
		for _, bucket := range b.Bucket {
			h.Bucket = append(h.Bucket, &dto.Bucket{UpperBound: bucket.UpperBound, CumulativeCount: bucket.CumulativeCount})
		}
		return h
	}
	for i, j := 0, 0; i < len(a.Bucket) && j < len(b.Bucket); {
		one, two := a.Bucket[i], b.Bucket[j]
		switch {
		case one.GetUpperBound() < two.GetUpperBound():
			i++
		case one.GetUpperBound() > two.GetUpperBound():
			j++
		default:
			n := one.GetCumulativeCount() + two.GetCumulativeCount()
			h.Bucket = append(h.Bucket, &dto.Bucket{UpperBound: one.UpperBound, CumulativeCount: &n})
			i++
			j++
		}
	}
	return h
}

// gauge adds a gauge of the fleet itself.
func (t total) gauge(name, help string, v float64) {
	typ := dto.MetricType_GAUGE
	t[name] = &sum{family: &dto.MetricFamily{Name: &name, Help: &help, Type: &typ, Metric: []*dto.Metric{{Gauge: &dto.Gauge{Value: &v}}}}}
}

// HistogramSuffixes are the suffixes of a histogram's series.
var HistogramSuffixes = [...]string{"_bucket", "_count", "_sum"}

// isSeries reports whether a name is the name of a histogram's series. Plugins of two
// processes may have defined a histogram and another metric with this name.
func (t total) isSeries(name string) bool {
	for _, suffix := range HistogramSuffixes {
		if base, ok := strings.CutSuffix(name, suffix); ok && t[base] != nil && t[base].family.GetType() == dto.MetricType_HISTOGRAM {
			return true
		}
	}
	return false
}

// families lists the sums, sorted by name.
func (t total) families() []*dto.MetricFamily {
	list := make([]*dto.MetricFamily, 0, len(t))
	for _, name := range slices.Sorted(maps.Keys(t)) {
		if len(t[name].family.Metric) > 0 && !t.isSeries(name) {
			list = append(list, t[name].family)
		}
	}
	return list
}
