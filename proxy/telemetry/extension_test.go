package telemetry

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// extended returns instruments with other names, and a function that returns the value of a series: of
// a counter or a gauge, or the number of observations. Its labels are values in any order.
func extended(t *testing.T, names ...string) (*Metrics, func(name string, labels ...string) float64) {
	t.Helper()
	reg := prometheus.NewRegistry()
	m := New(reg)
	m.ShowAs(reg, names, "vllm")
	return m, func(name string, labels ...string) float64 {
		t.Helper()
		all, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		found := -1.0
		for _, f := range all {
			for _, series := range f.Metric {
				if f.GetName() != name || !has(series, labels) {
					continue
				}
				if found >= 0 {
					t.Errorf("several series of %s have %v", name, labels)
				}
				found = series.GetCounter().GetValue() + series.GetGauge().GetValue() + float64(series.GetHistogram().GetSampleCount())
			}
		}
		return found
	}
}

func has(m *dto.Metric, labels []string) bool {
	var values []string
	for _, l := range m.Label {
		values = append(values, l.GetName()+"="+l.GetValue())
	}
	return !slices.ContainsFunc(labels, func(want string) bool { return !slices.Contains(values, want) })
}

// TestExtension: ended exchanges appear by the names, labels and errors of the other pickers.
func TestExtension(t *testing.T) {
	m, value := extended(t, config.MetricNamesExtension, config.MetricNamesLLMD)
	model := m.Model("served")
	model.Move(StageNone, StageRuns)
	model.Move(StageNone, StageSaturated)
	model.Move(StageNone, StageWaitsPlace)
	ok := Exchange{
		Model: "served", Requested: "chat", Tenant: "a", Priority: 10, Outcome: OutcomeOK, Flow: abi.FlowPrefillFirst, Stream: true, Intervals: new(Intervals),
		Waited: time.Second, FirstByte: time.Second, Duration: 3 * time.Second, Prompt: 100, Completion: 11, Cached: 50, Status: 200, Received: 400, Sent: 900,
	}
	model.Ended(&ok)
	refused := Exchange{Model: "served", Outcome: OutcomeShed, Status: 429, Intervals: new(Intervals), Waited: time.Second, Prompt: -1, Completion: -1, Cached: -1, Received: 10}
	model.Ended(&refused)
	old, llmd := []string{"model_name=chat", "target_model_name=served"}, []string{"model_name=chat", "target_model_name=served", "fairness_id=a", "priority=10"}
	for _, row := range ExtensionMetrics {
		if row.of == nil {
			continue
		}
		if row.Extension != "" {
			if n := value(row.Extension, old...); n != 1 {
				t.Errorf("%s: %v observations, want 1", row.Extension, n)
			}
		}
		if n := value(row.LLMD, llmd...); n != 1 {
			t.Errorf("%s: %v observations, want 1", row.LLMD, n)
		}
	}
	for _, tt := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{requestsName, append(slices.Clone(old), "priority=10"), 1}, {requestsName, []string{"model_name=served", "priority=0"}, 1},
		{"llm_d_epp_request_total", llmd, 1}, {"llm_d_epp_request_total", []string{"fairness_id=default-flow"}, 1},
		{errorsName, []string{"model_name=served", "target_model_name=served", "error_code=ResourceExhausted"}, 1}, {errorsName, []string{"model_name=chat"}, -1},
		{"llm_d_epp_request_error_total", []string{"fairness_id=default-flow", "priority=0", "error_code=ResourceExhausted"}, 1},
		{"llm_d_epp_request_ttft_seconds", []string{"streaming=true"}, 1}, {"llm_d_epp_request_ttft_seconds", []string{"streaming=false"}, 0},
		{"inference_extension_flow_control_request_queue_duration_seconds", []string{"outcome=Dispatched", "inference_pool=vllm", "priority=10", "fairness_id=a"}, 1},
		{"inference_objective_request_sizes", []string{"model_name=served"}, 1}, {"inference_objective_response_sizes", []string{"model_name=served"}, 0},
		{runningName, []string{"model_name=served"}, 1}, {requestRunningName, []string{"model_name=served", "target_model_name=served"}, 1},
		{queueSizeName, []string{"model_name=served", "target_model_name=served", "inference_pool=vllm"}, 2},
		{"llm_d_epp_flow_control_queue_size", []string{"model_name=served", "target_model_name=served", "inference_pool=vllm"}, 2},
	} {
		if got := value(tt.name, tt.labels...); got != tt.want {
			t.Errorf("%s %v: %v, want %v", tt.name, tt.labels, got, tt.want)
		}
	}
	m.extension.Load().forget("served")
	if got := value("llm_d_epp_request_total"); got != -1 {
		t.Errorf("a model that is forgotten has %v requests", got)
	}
	model.Ended(&ok)
	if got := value("llm_d_epp_request_total", llmd...); got != 1 {
		t.Errorf("a model that returns has %v requests", got)
	}
}

// TestExtensionErrors: each outcome has the error of llm-d.
func TestExtensionErrors(t *testing.T) {
	for _, tt := range []struct {
		outcome Outcome
		status  int
		want    string
	}{
		{OutcomeOK, 200, ""}, {OutcomeCancelled, 499, ""}, {OutcomeNone, 0, ""}, {OutcomeClientError, 400, "BadRequest"}, {OutcomeClientError, 401, "Unauthorized"},
		{OutcomeClientError, 403, "Forbidden"}, {OutcomeClientError, 404, "NotFound"}, {OutcomeClientError, 429, "ResourceExhausted"}, {OutcomeEngineError, 502, "ModelServerError"},
		{OutcomeTimeout, 504, "ModelServerError"}, {OutcomeBroken, 200, "ModelServerError"}, {OutcomeShed, 503, "ServiceUnavailable"}, {OutcomeShed, 429, "ResourceExhausted"},
		{OutcomeNoTarget, 503, "ServiceUnavailable"}, {OutcomeInternal, 500, "Internal"},
	} {
		if got := (&Exchange{Outcome: tt.outcome, Status: tt.status}).errorCode(); got != tt.want {
			t.Errorf("%v with status %d: %q, want %q", tt.outcome, tt.status, got, tt.want)
		}
	}
}

// TestExtensionNames: the configuration selects the names; without it, there are none. Each row of the
// table has an equal or says why not, and each equal is made.
func TestExtensionNames(t *testing.T) {
	for _, names := range [][]string{nil, {config.MetricNamesExtension}, {config.MetricNamesLLMD}, {config.MetricNamesExtension, config.MetricNamesLLMD}} {
		reg := prometheus.NewRegistry()
		m := New(reg)
		m.ShowAs(reg, names, "vllm")
		reg.MustRegister(gaugesOnly{NewExtensionGauges(names)})
		made := map[string]bool{}
		descs := make(chan *prometheus.Desc, 1000)
		reg.Describe(descs)
		close(descs)
		for d := range descs {
			name, _, _ := strings.Cut(strings.TrimPrefix(d.String(), `Desc{fqName: "`), `"`)
			made[name] = true
		}
		for _, row := range ExtensionMetrics {
			if row.Ours == "" && row.Note == "" || row.LLMD == "" && row.Extension == "" {
				t.Errorf("the row of %q and %q says nothing", row.Extension, row.LLMD)
			}
			for name, on := range map[string]bool{row.Extension: slices.Contains(names, config.MetricNamesExtension), row.LLMD: slices.Contains(names, config.MetricNamesLLMD)} {
				if want := on && row.Ours != ""; name != "" && made[name] != want {
					t.Errorf("names %q: %s is there: %v", names, name, made[name])
				}
			}
		}
	}
}

type gaugesOnly struct{ *ExtensionGauges }

func (gaugesOnly) Collect(chan<- prometheus.Metric) {}
