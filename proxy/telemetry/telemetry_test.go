package telemetry

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.opentelemetry.io/otel/attribute"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/pdproxy/pdproxy/abi"
)

// ended returns an exchange of one second whose engine reported no tokens and that was never to
// wait.
func ended(flow abi.Flow, out Outcome) *Exchange {
	return &Exchange{Flow: flow, Outcome: out, Duration: time.Second, Waited: -1, Intervals: new(Intervals)}
}

func TestMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := New(reg)
	o := m.Model("llama")
	one := ended(abi.FlowPrefillFirst, OutcomeOK)
	one.Prompt, one.Completion, one.Cached = 5, -1, 3 // the engine reported no second count
	o.Ended(one)
	m.Other.Ended(ended(abi.FlowNone, OutcomeClientError))
	m.Client("team", OutcomeOK)
	o.FirstByte(true, time.Second)
	o.FirstByte(false, 3*time.Second)
	o.FirstByte(false, 4*time.Second)
	m.Leg(abi.Prefill, "sglang", time.Second)
	m.LegError(abi.Decode, "d0", "reset")
	m.Retry(abi.Decode, "reset")
	m.Fallback("plan", "late")
	m.Cleanup("vllm-nixl", "abort_decode", time.Second)
	m.Cleanup("trtllm", "engine_timeout", 0)
	m.Cancelled(abi.Prefill)
	m.BrokenStream("leg")
	m.Shed("queue_full")
	m.Restart("p0")
	m.Minted("snowflake")
	meter := m.PolicyMeter("least_load", "place")
	meter.Observe(time.Microsecond)
	meter.Observe(time.Microsecond)
	meter.Fail("late")
	m.PolicyMeter("p", "load").Fail("failed") // never called: no histogram
	m.ConfigLoaded(true, time.UnixMilli(1500))
	m.ConfigLoaded(false, time.UnixMilli(9000))
	for name, want := range map[string]uint64{"pdproxy_time_to_first_token_seconds": 1, "pdproxy_whole_answer_seconds": 2} {
		if got := samples(t, reg, name); got != want {
			t.Errorf("%s has %d observations, want %d", name, got, want)
		}
	}
	want := `
# HELP pdproxy_config_reload_success 1 if the last read of the configuration, at the start or by a reload, succeeded; 0 while an older configuration stays in force.
# TYPE pdproxy_config_reload_success gauge
pdproxy_config_reload_success 0
# HELP pdproxy_config_reload_timestamp_seconds Time of the last read of the configuration that succeeded.
# TYPE pdproxy_config_reload_timestamp_seconds gauge
pdproxy_config_reload_timestamp_seconds 1.5
# HELP pdproxy_exchanges_total Exchanges that ended, by model, flow and outcome. The model is "other" if no engine serves it.
# TYPE pdproxy_exchanges_total counter
pdproxy_exchanges_total{flow="none",model="other",outcome="client_error"} 1
pdproxy_exchanges_total{flow="prefill_first",model="llama",outcome="ok"} 1
# HELP pdproxy_kv_cleanups_total Clean-ups of KV that failed exchanges left on engines, by the way that frees the KV.
# TYPE pdproxy_kv_cleanups_total counter
pdproxy_kv_cleanups_total{connector="trtllm",how="engine_timeout"} 1
pdproxy_kv_cleanups_total{connector="vllm-nixl",how="abort_decode"} 1
# HELP pdproxy_policy_failures_total Policy calls whose answer could not be used.
# TYPE pdproxy_policy_failures_total counter
pdproxy_policy_failures_total{hook="load",policy="p",reason="failed"} 1
pdproxy_policy_failures_total{hook="place",policy="least_load",reason="late"} 1
# HELP pdproxy_tokens_total Tokens that the engines reported, by model and kind.
# TYPE pdproxy_tokens_total counter
pdproxy_tokens_total{kind="cached",model="llama"} 3
pdproxy_tokens_total{kind="cached",model="other"} 0
pdproxy_tokens_total{kind="completion",model="llama"} 0
pdproxy_tokens_total{kind="completion",model="other"} 0
pdproxy_tokens_total{kind="prompt",model="llama"} 5
pdproxy_tokens_total{kind="prompt",model="other"} 0
`
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want),
		"pdproxy_config_reload_success", "pdproxy_config_reload_timestamp_seconds", "pdproxy_exchanges_total", "pdproxy_kv_cleanups_total", "pdproxy_policy_failures_total", "pdproxy_tokens_total"); err != nil {
		t.Error(err)
	}
	if n := testutil.CollectAndCount(m.policyTime); n != 1 {
		t.Errorf("%d series of policy times", n)
	}
	if n := testing.AllocsPerRun(100, func() { meter.Observe(time.Microsecond) }); n != 0 {
		t.Errorf("%v allocations to observe a call", n)
	}
	if n := testutil.CollectAndCount(m.cleanupTime); n != 1 {
		t.Errorf("%d series of clean-up times, want 1: a clean-up without a call has no time", n)
	}
}

// samples returns the number of observations of a histogram, with all labels.
func samples(t *testing.T, reg prometheus.Gatherer, name string) uint64 {
	t.Helper()
	all, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if f.GetName() == name {
			var n uint64
			for _, m := range f.GetMetric() {
				n += m.GetHistogram().GetSampleCount()
			}
			return n
		}
	}
	t.Fatalf("there is no metric %s", name)
	return 0
}

func TestIntervals(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := New(reg)
	var i Intervals
	for _, d := range []time.Duration{-time.Second, 0, 500 * time.Microsecond, 1500 * time.Microsecond, 20 * time.Millisecond, time.Hour} {
		i.Observe(d)
	}
	one := ended(abi.FlowNone, OutcomeOK)
	one.Intervals = &i
	m.Other.Ended(one)
	m.Other.Ended(ended(abi.FlowNone, OutcomeOK))
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "pdproxy_inter_event_seconds" {
			continue
		}
		h := f.GetMetric()[0].GetHistogram()
		if h.GetSampleCount() != 6 {
			t.Errorf("%d samples", h.GetSampleCount())
		}
		for _, b := range h.GetBucket() {
			var want uint64 = 5 // all buckets except the one of an hour
			switch {
			case b.GetUpperBound() < 0.002:
				want = 3
			case b.GetUpperBound() < 0.02:
				want = 4
			}
			if b.GetCumulativeCount() != want {
				t.Errorf("bucket %v holds %d, want %d", b.GetUpperBound(), b.GetCumulativeCount(), want)
			}
		}
		return
	}
	t.Error("the histogram is missing")
}

func TestSpans(t *testing.T) {
	rec := tracetest.NewSpanRecorder()
	tr := NewTracerTo(sdk.WithSpanProcessor(rec))
	start := time.Unix(1000, 0)
	h := http.Header{"Traceparent": {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}}
	s := tr.Start(h, start)
	var parent string
	s.Inject(func(name, value string) {
		if name == "traceparent" {
			parent = value
		}
	})
	if !strings.HasPrefix(parent, "00-0af7651916cd43dd8448eb211c80319c-") || strings.Contains(parent, "b7ad6b7169203331") {
		t.Errorf("traceparent for engines %q, want the client's trace and the proxy's span", parent)
	}
	s.Child("prefill", start, start.Add(time.Second), attribute.String("k", "v"))
	s.Child("decode", time.Time{}, start) // the leg never began
	s.End(start.Add(2*time.Second), OutcomeBroken)
	ended := rec.Ended()
	if len(ended) != 2 || ended[0].Name() != "prefill" || ended[1].Name() != "pdproxy.exchange" {
		t.Fatalf("spans %v", ended)
	}
	if d := ended[1].EndTime().Sub(ended[1].StartTime()); d != 2*time.Second {
		t.Errorf("the exchange's span lasts %v", d)
	}
	if ended[0].Parent().SpanID() != ended[1].SpanContext().SpanID() {
		t.Error("prefill is no child of the exchange")
	}
	if err := tr.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestNoTracer: without an endpoint there is no tracer, and Close accepts that.
func TestNoTracer(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
	tr, err := NewTracer(t.Context(), Identity{})
	if tr != nil || err != nil {
		t.Fatalf("NewTracer(t.Context(), Identity{}) = %v, %v, want nil, nil", tr, err)
	}
	if err := tr.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
