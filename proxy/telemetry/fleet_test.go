package telemetry

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
)

// process is a process with a few metrics.
type process struct {
	*prometheus.Registry
	served *prometheus.CounterVec
	times  prometheus.Histogram
}

func newProcess(start float64, borders ...float64) *process {
	p := &process{
		Registry: prometheus.NewRegistry(),
		served:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: "pdproxy_served_total", Help: "h"}, []string{"flow"}),
		times:    prometheus.NewHistogram(prometheus.HistogramOpts{Name: "pdproxy_time_seconds", Buckets: borders}),
	}
	gauge := func(name string, v float64) {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name})
		g.Set(v)
		p.MustRegister(g)
	}
	p.MustRegister(p.served, p.times)
	gauge("pdproxy_guests", 2)
	gauge("pdproxy_leases_open", start)
	gauge("go_goroutines", 10)
	gauge(startTime, start)
	return p
}

// text returns the process's answer.
func (p *process) text(t *testing.T) []byte {
	t.Helper()
	list, err := p.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	e := expfmt.NewEncoder(&b, WireFormat)
	for _, family := range list {
		if err := e.Encode(family); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

// shown returns the metrics of a Fleet as text, without comments.
func shown(t *testing.T, f *Fleet) map[string]string {
	t.Helper()
	list, err := f.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.IsSortedFunc(list, func(a, b *dto.MetricFamily) int { return strings.Compare(a.GetName(), b.GetName()) }) {
		t.Error("the families are in no order")
	}
	var b bytes.Buffer
	e := expfmt.NewEncoder(&b, expfmt.NewFormat(expfmt.TypeTextPlain))
	for _, family := range list {
		if err := e.Encode(family); err != nil {
			t.Fatal(err)
		}
	}
	values := map[string]string{}
	for line := range strings.Lines(b.String()) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && !strings.HasPrefix(line, "#") {
			if _, twice := values[name]; twice {
				t.Errorf("%s is there twice", name)
			}
			values[name] = value
		}
	}
	return values
}

func expect(t *testing.T, f *Fleet, want map[string]string) {
	t.Helper()
	got := shown(t, f)
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if got[name] != want[name] {
			t.Errorf("%s %s, want %s", name, got[name], want[name])
		}
	}
}

// TestFleet: some metrics are the sum over the processes, some are the coordinator's
// value, and others have a label for the process. No sum falls when a process is silent,
// ends or is replaced.
func TestFleet(t *testing.T) {
	own, a, b := newProcess(1, 1, 10), newProcess(100, 1, 10), newProcess(200, 1, 5, 10)
	own.served.WithLabelValues("aggregated").Add(1)
	a.served.WithLabelValues("aggregated").Add(10)
	b.served.WithLabelValues("aggregated").Add(100)
	b.served.WithLabelValues("concurrent").Add(7)
	a.times.Observe(0.5)
	b.times.Observe(3)
	b.times.Observe(30)
	var answers []Process
	f := NewFleet(own, func() []Process { return answers })
	all := func() { answers = []Process{{Name: "h/0", Text: a.text(t)}, {Name: "h/1", Text: b.text(t)}} }
	all()
	expect(t, f, map[string]string{
		`pdproxy_served_total{flow="aggregated"}`: "111", `pdproxy_served_total{flow="concurrent"}`: "7",
		`pdproxy_time_seconds_bucket{le="1"}`: "1", `pdproxy_time_seconds_bucket{le="5"}`: "", `pdproxy_time_seconds_bucket{le="10"}`: "2", `pdproxy_time_seconds_bucket{le="+Inf"}`: "3",
		`pdproxy_time_seconds_count`: "3", `pdproxy_time_seconds_sum`: "33.5",
		`pdproxy_guests`: "6", `pdproxy_leases_open`: "1",
		`go_goroutines{process="coordinator"}`: "10", `go_goroutines{process="h/1"}`: "10", `process_start_time_seconds{process="h/0"}`: "100",
		`pdproxy_fleet_workers`: "2", `pdproxy_fleet_silent_workers`: "0",
	})
	a.served.WithLabelValues("aggregated").Inc()
	answers = []Process{{Name: "h/0", Text: a.text(t)}, {Name: "h/1", Failed: true}}
	expect(t, f, map[string]string{
		`pdproxy_served_total{flow="aggregated"}`: "112", `pdproxy_served_total{flow="concurrent"}`: "7", `pdproxy_time_seconds_count`: "3",
		`pdproxy_guests`: "4", `go_goroutines{process="h/1"}`: "", `pdproxy_fleet_workers`: "2", `pdproxy_fleet_silent_workers`: "1",
	})
	answers = []Process{{Name: "h/0", Text: []byte("\xffgarbage")}}
	expect(t, f, map[string]string{
		`pdproxy_served_total{flow="aggregated"}`: "112", `pdproxy_guests`: "2", `pdproxy_fleet_workers`: "1", `pdproxy_fleet_silent_workers`: "1",
	})
	b.served.WithLabelValues("concurrent").Inc()
	a = newProcess(300, 1, 10) // a process that replaces the former one
	a.served.WithLabelValues("aggregated").Add(5)
	all()
	expect(t, f, map[string]string{`pdproxy_served_total{flow="aggregated"}`: "117", `pdproxy_served_total{flow="concurrent"}`: "8", `pdproxy_time_seconds_count`: "3"})
}

// TestFleetForgets: the sum keeps the values of all former processes.
func TestFleetForgets(t *testing.T) {
	var answers []Process
	f := NewFleet(newProcess(1, 1), func() []Process { return answers })
	const lives = maxKnown + 40
	for n := range lives {
		p := newProcess(float64(100+n), 1)
		p.served.WithLabelValues("aggregated").Add(2)
		p.times.Observe(0.1)
		answers = []Process{{Name: fmt.Sprint("h/", n%3), Text: p.text(t)}}
		if n%50 == 0 || n == lives-1 {
			expect(t, f, map[string]string{`pdproxy_served_total{flow="aggregated"}`: fmt.Sprint(2 * (n + 1)), `pdproxy_time_seconds_count`: fmt.Sprint(n + 1)})
		} else if _, err := f.Gather(); err != nil {
			t.Fatal(err)
		}
	}
	if len(f.known) > maxKnown {
		t.Errorf("%d processes are remembered", len(f.known))
	}
}

// TestFleetOfUnlikeProcesses: if two processes give a name different types, the first
// type counts.
func TestFleetOfUnlikeProcesses(t *testing.T) {
	own, other := prometheus.NewRegistry(), &process{Registry: prometheus.NewRegistry()}
	counter, gauge := prometheus.NewCounter(prometheus.CounterOpts{Name: "x"}), prometheus.NewGauge(prometheus.GaugeOpts{Name: "x"})
	counter.Add(3)
	gauge.Set(4)
	own.MustRegister(counter)
	other.MustRegister(gauge)
	f := NewFleet(own, func() []Process { return []Process{{Name: "h/0", Text: other.text(t)}} })
	expect(t, f, map[string]string{"x": "3"})
}

// TestFleetOfCollidingProcesses: a histogram of one process and a series of the
// same name of another do not make the metrics unreadable, nor does a metric that
// cannot be gathered.
func TestFleetOfCollidingProcesses(t *testing.T) {
	own, other := prometheus.NewRegistry(), &process{Registry: prometheus.NewRegistry()}
	times, count := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "h", Buckets: []float64{1}}), prometheus.NewCounter(prometheus.CounterOpts{Name: "h_count"})
	times.Observe(0.5)
	count.Add(7)
	own.MustRegister(times)
	other.MustRegister(count)
	f := NewFleet(own, func() []Process { return []Process{{Name: "h/0", Text: other.text(t)}} })
	expect(t, f, map[string]string{"h_count": "1"})

	own.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "fine"}, func() float64 { return 2 }))
	own.MustRegister(badMetric{})
	list, err := f.Gather()
	if err == nil || !slices.ContainsFunc(list, func(m *dto.MetricFamily) bool { return m.GetName() == "fine" }) {
		t.Errorf("%d families, %v: the bad one hides the others", len(list), err)
	}
}

// badMetric is a collector whose metric cannot be gathered.
type badMetric struct{}

func (badMetric) Describe(chan<- *prometheus.Desc) {}

func (badMetric) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.NewInvalidMetric(prometheus.NewDesc("bad", "h", nil, nil), fmt.Errorf("bad"))
}
