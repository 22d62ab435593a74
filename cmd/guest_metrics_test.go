package cmd

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/shared"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

func TestGuestMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	g := newGuestMetrics()
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
		t.Error("another metric for the same name")
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
		t.Error("one name has two kinds")
	}
	if _, err := g.of("b").Define(host.Gauge, ""); err == nil {
		t.Error("an empty name is taken")
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

func TestFilterMeter(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := newFilterMeter(telemetry.New(reg), "f")
	m.Observe(host.OnRequestHeaders, time.Millisecond)
	m.Fail(host.OnRequestHeaders, "trap")
	m.Fail(host.OnGRPCClose, "trap") // never called, and harmless
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
