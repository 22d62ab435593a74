package node

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/shared"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// pluginMetrics holds the metrics that plugins define. They are shown as
// pdproxy_plugin_<name>{plugin="..."}. A new version of a plugin continues with the
// values of the former version, because counters must not fall. pluginMetrics is safe for
// concurrent use.
type pluginMetrics struct {
	mu       sync.Mutex
	families map[string]*metricFamily // by metricName; guarded by mu
	counts   map[string]int           // metrics by plugin; guarded by mu
}

// metricFamily holds the metrics of one name.
type metricFamily struct {
	name     string // as the plugin wrote it
	kind     host.MetricKind
	byPlugin map[string]*pluginMetric
}

func newPluginMetrics() *pluginMetrics {
	return &pluginMetrics{families: make(map[string]*metricFamily), counts: make(map[string]int)}
}

// of returns the metrics of one plugin.
func (g *pluginMetrics) of(plugin string) shared.Metrics { return metricsOf{g, plugin} }

type metricsOf struct {
	all    *pluginMetrics
	plugin string
}

// Define implements shared.Metrics. Several plugins may use one name with the same kind;
// the label distinguishes their metrics. Define returns an error for every metric that
// would make Prometheus reject the whole answer of /metrics.
func (p metricsOf) Define(kind host.MetricKind, name string) (shared.Metric, error) {
	g, clean := p.all, metricName(name)
	if clean == "" || len(name) > host.MaxMetricName {
		return nil, fmt.Errorf("define metric: a name has 1 to %d bytes", host.MaxMetricName)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	family := g.families[clean]
	switch {
	case family == nil && g.collides(kind, clean):
		return nil, fmt.Errorf("define metric: %s collides with the series of another metric", clean)
	case family == nil:
		family = &metricFamily{name, kind, make(map[string]*pluginMetric)}
	case family.kind != kind:
		return nil, fmt.Errorf("define metric: %s has another kind", clean)
	case family.name != name:
		return nil, fmt.Errorf("define metric: another name is shown as %s already", clean)
	}
	m := family.byPlugin[p.plugin]
	if m == nil {
		if g.counts[p.plugin] >= shared.MaxMetrics {
			return nil, shared.ErrTooManyMetrics
		}
		g.counts[p.plugin]++
		m = newPluginMetric(kind, clean, p.plugin)
		family.byPlugin[p.plugin] = m
		g.families[clean] = family
	}
	return m, nil
}

// collides reports whether a new metric would have a series in common with another one. A
// histogram named h has the series h_bucket, h_count and h_sum. g.mu is held.
func (g *pluginMetrics) collides(kind host.MetricKind, clean string) bool {
	for _, suffix := range telemetry.HistogramSuffixes {
		if kind == host.Histogram && g.families[clean+suffix] != nil {
			return true
		}
		if base, ok := strings.CutSuffix(clean, suffix); ok && g.families[base] != nil && g.families[base].kind == host.Histogram {
			return true
		}
	}
	return false
}

// metricName replaces the characters of a plugin's name that Prometheus does not allow.
func metricName(name string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' {
			return r
		}
		return '_'
	}, name)
}

// Describe implements prometheus.Collector. It describes nothing, because plugins define
// metrics at any time.
func (g *pluginMetrics) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (g *pluginMetrics) Collect(ch chan<- prometheus.Metric) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, family := range g.families {
		for _, m := range family.byPlugin {
			m.collect(ch)
		}
	}
}

// histogramBuckets are Envoy's bucket borders (source/common/stats/histogram_impl.cc).
// The proxy does not know the units of plugins' measurements, so the borders are the same
// for all metrics.
var histogramBuckets = []float64{.5, 1, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000, 300000, 600000, 1800000, 3600000}

// pluginMetric is one metric of one plugin.
type pluginMetric struct {
	kind      host.MetricKind
	desc      *prometheus.Desc
	value     atomic.Int64         // of counters and gauges
	histogram prometheus.Histogram // nil for others
}

func newPluginMetric(kind host.MetricKind, name, plugin string) *pluginMetric {
	name, help, labels := "pdproxy_plugin_"+name, "Defined by a plugin.", prometheus.Labels{"plugin": plugin}
	m := &pluginMetric{kind: kind, desc: prometheus.NewDesc(name, help, nil, labels)}
	if kind == host.Histogram {
		m.histogram = prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, ConstLabels: labels, Buckets: histogramBuckets})
	}
	return m
}

// Add implements shared.Metric.
func (m *pluginMetric) Add(delta int64) { m.value.Add(delta) }

// Record implements shared.Metric.
func (m *pluginMetric) Record(value uint64) {
	switch m.kind {
	case host.Histogram:
		m.histogram.Observe(float64(value))
	case host.Counter:
		m.value.Add(int64(value))
	default:
		m.value.Store(int64(value))
	}
}

// Value implements shared.Metric.
func (m *pluginMetric) Value() uint64 { return uint64(m.value.Load()) }

func (m *pluginMetric) collect(ch chan<- prometheus.Metric) {
	switch m.kind {
	case host.Histogram:
		m.histogram.Collect(ch)
	case host.Counter:
		ch <- prometheus.MustNewConstMetric(m.desc, prometheus.CounterValue, float64(m.Value()))
	default:
		ch <- prometheus.MustNewConstMetric(m.desc, prometheus.GaugeValue, float64(m.value.Load()))
	}
}

// filterMeter measures the callbacks of a filter in the same way as the hooks of a policy.
type filterMeter struct {
	metrics *telemetry.Metrics
	name    string
	hooks   [host.OnDelete + 1]atomic.Pointer[telemetry.PolicyMeter]
}

func newFilterMeter(metrics *telemetry.Metrics, name string) *filterMeter {
	return &filterMeter{metrics: metrics, name: name}
}

func (f *filterMeter) hook(c host.Callback) *telemetry.PolicyMeter {
	c = min(c, host.OnDelete) // later callbacks are never called
	m := f.hooks[c].Load()
	if m == nil {
		m = f.metrics.PolicyMeter(f.name, strings.TrimPrefix(c.String(), "proxy_on_"))
		f.hooks[c].Store(m)
	}
	return m
}

// Observe implements filter.Meter.
func (f *filterMeter) Observe(c host.Callback, d time.Duration) { f.hook(c).Observe(d) }

// Fail implements filter.Meter.
func (f *filterMeter) Fail(c host.Callback, reason string) { f.hook(c).Fail(reason) }
