package node

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/shared"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

func TestPluginMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	g := newPluginMetrics()
	reg.MustRegister(g)
	define := func(plugin string, kind host.MetricKind, name string) shared.Metric {
		t.Helper()
		m, err := g.of(plugin).Define(kind, name)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	requests := define("a", host.Counter, "http.requests-total")
	requests.Add(2)
	requests.Record(3)
	if again := define("a", host.Counter, "http.requests-total"); again != requests {
		t.Error("a second Define of the same name returns another metric")
	}
	define("b", host.Counter, "http.requests-total").Add(7)
	level := define("a", host.Gauge, "level")
	level.Record(9)
	level.Add(-10)
	if requests.Value() != 5 || int64(level.Value()) != -1 {
		t.Errorf("values %d and %d", requests.Value(), level.Value())
	}
	define("a", host.Histogram, "wait").Record(30)
	if _, err := g.of("b").Define(host.Gauge, "http_requests_total"); err == nil {
		t.Error("one name is accepted with two types")
	}
	if _, err := g.of("b").Define(host.Gauge, ""); err == nil {
		t.Error("an empty name is accepted")
	}
	if _, err := g.of("b").Define(host.Counter, "http_requests_total"); err == nil {
		t.Error("two names are shown as one")
	}
	err := testutil.GatherAndCompare(reg, strings.NewReader(`
# HELP pdproxy_plugin_http_requests_total Defined by a plugin.
# TYPE pdproxy_plugin_http_requests_total counter
pdproxy_plugin_http_requests_total{plugin="a"} 5
pdproxy_plugin_http_requests_total{plugin="b"} 7
# HELP pdproxy_plugin_level Defined by a plugin.
# TYPE pdproxy_plugin_level gauge
pdproxy_plugin_level{plugin="a"} -1
`), "pdproxy_plugin_http_requests_total", "pdproxy_plugin_level")
	if err != nil {
		t.Error(err)
	}
	if n, err := testutil.GatherAndCount(reg, "pdproxy_plugin_wait"); n != 1 || err != nil {
		t.Errorf("%d histograms, %v", n, err)
	}
}

// hostileNames are names that a plugin may define to break /metrics.
var hostileNames = []string{
	"h", "h_count", "h_sum", "h_bucket", "h_created", "h_total", "h.count", "H", "h_bucket_count", "", "1", "é", "\xff\x00\n\"}", "x_count", "x_sum", "x_bucket", "x", "x.bucket.sum",
	"le", "_", "__name__", strings.Repeat("h", host.MaxMetricName), strings.Repeat("h", host.MaxMetricName+1), strings.Repeat("h", 16<<20),
}

// TestMetricsSurviveAnyPlugin: whatever plugins define, in any order, all metrics can be
// gathered and read, and no name is too long.
func TestMetricsSurviveAnyPlugin(t *testing.T) {
	for seed := range uint64(10) {
		random := rand.New(rand.NewPCG(seed, 0))
		reg := prometheus.NewRegistry()
		telemetry.New(reg).PolicyMeter("p", "place").Fail("trap")
		g := newPluginMetrics()
		reg.MustRegister(g)
		defined := 0
		for range 200 {
			plugin, kind := string('a'+rune(random.IntN(3))), host.MetricKind(random.IntN(3))
			m, err := g.of(plugin).Define(kind, hostileNames[random.IntN(len(hostileNames))])
			if err == nil {
				defined++
				m.Record(7)
			}
		}
		families, err := reg.Gather()
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		var text bytes.Buffer
		for _, family := range families {
			if len(family.GetName()) > len("pdproxy_plugin_")+host.MaxMetricName {
				t.Errorf("seed %d: a name of %d bytes", seed, len(family.GetName()))
			}
			if _, err := expfmt.MetricFamilyToText(&text, family); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
		parser := expfmt.NewTextParser(model.UTF8Validation)
		read, err := parser.TextToMetricFamilies(&text)
		if err != nil || len(read) != len(families) || defined == 0 {
			t.Fatalf("seed %d: %d of %d families are read: %v", seed, len(read), len(families), err)
		}
		if read["pdproxy_policy_failures_total"] == nil {
			t.Errorf("seed %d: the proxy's own metrics are lost", seed)
		}
	}
}

// TestMetricsOfAPluginAreBounded: the limit of metrics applies to all versions of a plugin
// together.
func TestMetricsOfAPluginAreBounded(t *testing.T) {
	g := newPluginMetrics()
	for version := range 3 {
		table := shared.NewMetricTable(g.of("a"))
		for i := range shared.MaxMetrics {
			_, status := table.Define(host.Counter, fmt.Sprint("v", version, "_", i))
			if want := []host.Status{host.OK, host.InternalFailure}[min(version, 1)]; status != want {
				t.Fatalf("version %d, metric %d: status %d", version, i, status)
			}
		}
	}
	table := shared.NewMetricTable(g.of("a"))
	if _, status := table.Define(host.Counter, "v0_7"); status != host.OK {
		t.Errorf("a metric of the first version: status %d", status)
	}
	if _, status := shared.NewMetricTable(g.of("b")).Define(host.Counter, "v0_x"); status != host.OK {
		t.Errorf("a metric of another plugin: status %d", status)
	}
	for _, name := range []string{strings.Repeat("n", host.MaxMetricName+1), "v0.7"} {
		if _, status := table.Define(host.Counter, name); status != host.BadArgument {
			t.Errorf("a name of %d bytes: status %d", len(name), status)
		}
	}
}

// TestOwnMetricsAreApart: plugins cannot define a metric with the name of one of the
// proxy's own.
func TestOwnMetricsAreApart(t *testing.T) {
	reg := prometheus.NewRegistry()
	telemetry.New(reg)
	descs := make(chan *prometheus.Desc, 1000)
	reg.Describe(descs)
	close(descs)
	n := 0
	for desc := range descs {
		n++
		if strings.Contains(desc.String(), `"pdproxy_plugin_`) {
			t.Errorf("%v can collide with a plugin's", desc)
		}
	}
	if n < 10 {
		t.Errorf("only %d metrics are described", n)
	}
}

func TestFilterMeter(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := newFilterMeter(telemetry.New(reg), "f")
	m.Observe(host.OnRequestHeaders, time.Millisecond)
	m.Fail(host.OnRequestHeaders, "trap")
	m.Fail(host.OnGRPCClose, "trap") // is never called; must not panic
	err := testutil.GatherAndCompare(reg, strings.NewReader(`
# HELP pdproxy_policy_failures_total Policy calls whose answer could not be used.
# TYPE pdproxy_policy_failures_total counter
pdproxy_policy_failures_total{hook="delete",policy="f",reason="trap"} 1
pdproxy_policy_failures_total{hook="request_headers",policy="f",reason="trap"} 1
`), "pdproxy_policy_failures_total")
	if err != nil {
		t.Error(err)
	}
}
