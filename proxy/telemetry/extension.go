package telemetry

import (
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// noFlow is the label fairness_id of requests without a tenant, as in llm-d.
const noFlow = "default-flow"

// Extension shows the values of ended exchanges by the names, labels and buckets of other endpoint
// pickers. The buckets of a histogram cannot be computed from those of another one, so each exchange is
// observed once more at its end. Safe for concurrent use.
type Extension struct {
	pool       string // label inference_pool
	counters   []extensionVec[prometheus.Counter]
	errors     []extensionVec[prometheus.Counter]
	histograms []extensionVec[prometheus.Observer]
	series     sync.Map // of *extensionSeries by extensionKey
}

// extensionVec is a metric with its labels.
type extensionVec[T any] struct {
	labels []string
	with   func(prometheus.Labels) T
	delete func(prometheus.Labels) int
	of     func(*Exchange) (v float64, ok bool) // of a histogram
}

// extensionKey has the labels of exchanges that share their instruments.
type extensionKey struct {
	model, target, flow string
	priority            int
	stream              bool
}

// extensionSeries are the instruments of exchanges with the same labels.
type extensionSeries struct {
	labels     prometheus.Labels
	counters   []prometheus.Counter
	histograms []prometheus.Observer // in the order of Extension.histograms
}

// ShowAs makes the metrics of ended exchanges appear by other names, too: names has values of
// metrics.names. pool is the name of the InferencePool. Call ShowAs once, before the first request.
func (m *Metrics) ShowAs(reg prometheus.Registerer, names []string, pool string) {
	if len(names) == 0 {
		return
	}
	x := &Extension{pool: pool}
	all := []string{"model_name", "target_model_name", "fairness_id", "priority"}
	for _, row := range ExtensionMetrics {
		for _, name := range row.shown(names) {
			labels := all
			if name == row.Extension && !row.flow {
				labels = all[:2]
			}
			labels = append(slices.Clone(labels), row.more...)
			switch {
			case row.of != nil:
				v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: row.help(), Buckets: row.buckets}, labels)
				reg.MustRegister(v)
				x.histograms = append(x.histograms, extensionVec[prometheus.Observer]{labels, v.With, v.DeletePartialMatch, row.of})
			case row.Extension == requestsName:
				if name == requestsName {
					labels = append(labels, "priority")
				}
				x.counters = append(x.counters, x.counter(reg, name, row.help(), labels))
			case row.Extension == errorsName:
				x.errors = append(x.errors, x.counter(reg, name, row.help(), append(labels, "error_code")))
			case name == runningName:
				reg.MustRegister(newModelGauge(m.running, name, row.help(), "", labels[:1]))
			case row.LLMD == requestRunningName:
				reg.MustRegister(newModelGauge(m.running, name, row.help(), "", all[:2]))
			case row.Extension == queueSizeName:
				reg.MustRegister(newModelGauge(m.waiting, name, row.help(), pool, all[:2]))
			}
		}
	}
	m.extension.Store(x)
}

// shown returns those of the row's names that a configuration shows.
func (r *ExtensionMetric) shown(names []string) (list []string) {
	if r.Ours == "" {
		return nil
	}
	if r.Extension != "" && slices.Contains(names, config.MetricNamesExtension) {
		list = append(list, r.Extension)
	}
	if r.LLMD != "" && slices.Contains(names, config.MetricNamesLLMD) {
		list = append(list, r.LLMD)
	}
	return list
}

// help returns the help text of a row.
func (r *ExtensionMetric) help() string {
	return "The values of " + r.Ours + " by the name that other endpoint pickers use (metrics.names)."
}

func (x *Extension) counter(reg prometheus.Registerer, name, help string, labels []string) extensionVec[prometheus.Counter] {
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	reg.MustRegister(v)
	return extensionVec[prometheus.Counter]{labels: labels, with: v.With, delete: v.DeletePartialMatch}
}

// at returns the metric with those of the labels that the metric has.
func (v *extensionVec[T]) at(all prometheus.Labels) T {
	own := make(prometheus.Labels, len(v.labels))
	for _, name := range v.labels {
		own[name] = all[name]
	}
	return v.with(own)
}

// Ended counts an exchange that has ended.
func (x *Extension) Ended(e *Exchange) {
	key := extensionKey{model: e.Requested, target: e.Model, flow: e.Tenant, priority: e.Priority, stream: e.Stream}
	if key.model == "" {
		key.model = key.target
	}
	if key.flow == "" {
		key.flow = noFlow
	}
	var s *extensionSeries
	if known, ok := x.series.Load(key); ok {
		s = known.(*extensionSeries)
	} else {
		made, _ := x.series.LoadOrStore(key, x.newSeries(key))
		s = made.(*extensionSeries)
	}
	for _, c := range s.counters {
		c.Inc()
	}
	for i, o := range s.histograms {
		if v, ok := x.histograms[i].of(e); ok {
			o.Observe(v)
		}
	}
	if code := e.errorCode(); code != "" {
		labels := prometheus.Labels{"error_code": code}
		for name, value := range s.labels {
			labels[name] = value
		}
		for i := range x.errors {
			x.errors[i].at(labels).Inc()
		}
	}
}

func (x *Extension) newSeries(k extensionKey) *extensionSeries {
	s := &extensionSeries{labels: prometheus.Labels{
		"model_name": k.model, "target_model_name": k.target, "fairness_id": k.flow, "priority": strconv.Itoa(k.priority),
		"streaming": strconv.FormatBool(k.stream), "outcome": "Dispatched", "inference_pool": x.pool,
	}}
	for i := range x.counters {
		s.counters = append(s.counters, x.counters[i].at(s.labels))
	}
	for i := range x.histograms {
		s.histograms = append(s.histograms, x.histograms[i].at(s.labels))
	}
	return s
}

// forget removes the series of a model that no engine serves.
func (x *Extension) forget(model string) {
	x.series.Range(func(key, _ any) bool {
		if key.(extensionKey).target == model {
			x.series.Delete(key)
		}
		return true
	})
	of := prometheus.Labels{"target_model_name": model}
	for _, list := range [][]extensionVec[prometheus.Counter]{x.counters, x.errors} {
		for _, v := range list {
			v.delete(of)
		}
	}
	for _, v := range x.histograms {
		v.delete(of)
	}
}

// errorCode returns the error of the exchange in the words of llm-d (llm-d-router,
// pkg/common/error/error.go); "": no error.
func (e *Exchange) errorCode() string {
	switch e.Outcome {
	case OutcomeClientError:
		switch e.Status {
		case 401:
			return "Unauthorized"
		case 403:
			return "Forbidden"
		case 404:
			return "NotFound"
		case 429:
			return "ResourceExhausted"
		}
		return "BadRequest"
	case OutcomeEngineError, OutcomeTimeout, OutcomeBroken:
		return "ModelServerError"
	case OutcomeShed:
		if e.Status == 429 {
			return "ResourceExhausted"
		}
		return "ServiceUnavailable"
	case OutcomeNoTarget:
		return "ServiceUnavailable"
	case OutcomeInternal:
		return "Internal"
	}
	return ""
}

// modelGauge shows the sums of a gauge over each model by another name.
type modelGauge struct {
	of     *prometheus.GaugeVec
	desc   *prometheus.Desc
	labels int // labels with the name of the model
}

// newModelGauge returns the gauge of by a name, with these labels for the name of the model. With a pool
// it also has the label inference_pool.
func newModelGauge(of *prometheus.GaugeVec, name, help, pool string, labels []string) modelGauge {
	var more prometheus.Labels
	if pool != "" {
		more = prometheus.Labels{"inference_pool": pool}
	}
	return modelGauge{of: of, desc: prometheus.NewDesc(name, help, labels, more), labels: len(labels)}
}

// Describe implements prometheus.Collector.
func (g modelGauge) Describe(ch chan<- *prometheus.Desc) { ch <- g.desc }

// Collect implements prometheus.Collector.
func (g modelGauge) Collect(ch chan<- prometheus.Metric) {
	for model, v := range sumBy(g.of, "model") {
		ch <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, v, slices.Repeat([]string{model}, g.labels)...)
	}
}

// ExtensionGauges are the gauges of a pool of engines that a scrape reads from the registry.
type ExtensionGauges struct{ descs map[string]*prometheus.Desc }

// NewExtensionGauges returns the gauges that names, values of metrics.names, select.
func NewExtensionGauges(names []string) *ExtensionGauges {
	g := &ExtensionGauges{descs: map[string]*prometheus.Desc{}}
	for _, row := range ExtensionMetrics {
		for _, name := range row.shown(names) {
			labels := []string{"name"}
			switch {
			case strings.HasSuffix(name, "_per_pod_queue_size"):
				labels = append(labels, "model_server_pod")
			case strings.HasSuffix(name, "_per_endpoint_queue_size"):
				labels = append(labels, "model_server_endpoint")
			case strings.HasSuffix(name, "_pool_saturation"):
				labels = []string{"inference_pool", "stage"}
			case strings.HasSuffix(name, "_info"):
				labels = []string{"commit", "build_ref"}
			case !strings.Contains(name, "_average_") && !strings.Contains(name, "_std_dev_") && !strings.Contains(name, "_ready_"):
				continue
			}
			g.descs[name] = prometheus.NewDesc(name, row.help(), labels, nil)
		}
	}
	return g
}

// Describe sends the descriptions of the gauges.
func (g *ExtensionGauges) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range g.descs {
		ch <- d
	}
}

// Send sends the gauges with that end of their names, for example average_queue_size.
func (g *ExtensionGauges) Send(ch chan<- prometheus.Metric, end string, v float64, labels ...string) {
	for name, d := range g.descs {
		if strings.HasSuffix(name, "_"+end) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
		}
	}
}
