package telemetry

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/pdproxy/pdproxy/abi"
)

// TestModelsAreBounded: engines may report any number of models, with any names.
func TestModelsAreBounded(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := New(reg)
	first := m.Model("first")
	for i := range 10_000 {
		m.Model(fmt.Sprint("adapter-", i)).Ended(ended(abi.FlowAggregated, OutcomeOK))
	}
	if m.Model("first") != first {
		t.Error("a known model lost its instruments")
	}
	for _, name := range []string{"", "\xff", strings.Repeat("n", MaxModelName+1), "one too many"} {
		if got := m.Model(name); got != m.Other {
			t.Errorf("model %.20q has the label %.20q", name, got.Name)
		}
	}
	if n := testutil.CollectAndCount(m.exchanges); n != maxModels {
		t.Errorf("%d series of exchanges, want %d: a model less first, and other", n, maxModels)
	}
	if _, err := reg.Gather(); err != nil {
		t.Error(err)
	}
}

// TestStages: a request is in one gauge at a time.
func TestStages(t *testing.T) {
	reg := prometheus.NewRegistry()
	o := New(reg).Model("llama")
	show := func() string {
		return fmt.Sprint(testutil.ToFloat64(o.stages[StageWaitsPlace]), testutil.ToFloat64(o.stages[StageWaitsEngine]), testutil.ToFloat64(o.stages[StageRuns]))
	}
	at := StageNone
	for _, tt := range []struct {
		to   Stage
		want string
	}{
		{StageWaitsPlace, "1 0 0"}, {StageRuns, "0 0 1"}, {StageWaitsEngine, "0 1 0"}, {StageRuns, "0 0 1"}, {StageNone, "0 0 0"}, {StageNone, "0 0 0"},
	} {
		o.Move(at, tt.to)
		if at = tt.to; show() != tt.want {
			t.Errorf("stage %d: gauges %s, want %s", tt.to, show(), tt.want)
		}
	}
	o.Ended(ended(abi.FlowNone, OutcomeShed))
	one := ended(abi.FlowAggregated, OutcomeOK)
	one.Waited = 0
	o.Ended(one)
	if n := samples(t, reg, "pdproxy_queue_wait_seconds"); n != 1 {
		t.Errorf("%d waits, want 1: a request that was refused before it could wait has none", n)
	}
}

// measured returns an exchange that did not wait.
func measured() *Exchange {
	one := ended(abi.FlowPrefillFirst, OutcomeOK)
	one.Waited, one.Prompt, one.Completion, one.Cached = 0, 10, 20, 5
	return one
}

// TestModelCostsNothing: the instruments of a request allocate nothing.
func TestModelCostsNothing(t *testing.T) {
	m := New(prometheus.NewRegistry())
	m.Model("llama")
	one := measured()
	if n := testing.AllocsPerRun(100, func() {
		o := m.Model("llama")
		o.Move(StageNone, StageRuns)
		o.FirstByte(true, time.Second)
		one.Intervals.Observe(time.Millisecond)
		o.Move(StageRuns, StageNone)
		o.Ended(one)
	}); n != 0 {
		t.Errorf("%v allocations for a request", n)
	}
}

func BenchmarkModel(b *testing.B) {
	m, one := New(prometheus.NewRegistry()), measured()
	b.ReportAllocs()
	for b.Loop() {
		o := m.Model("llama")
		o.Move(StageNone, StageWaitsPlace)
		o.Move(StageWaitsPlace, StageRuns)
		o.FirstByte(true, time.Second)
		o.Move(StageRuns, StageNone)
		o.Ended(one)
	}
}

// TestModelsLeave: names of models that no engine serves make room for new ones, with all their
// series. Models that are served, or have a request, stay.
func TestModelsLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := prometheus.NewRegistry()
		m := New(reg)
		served := map[string]bool{"base": true}
		m.ModelsServed(func(name string) bool { return served[name] })
		use := func(name string) *Model {
			o := m.Model(name)
			o.Move(StageNone, StageRuns)
			o.FirstByte(true, time.Second)
			o.FirstByte(false, time.Second)
			o.Move(StageRuns, StageNone)
			o.Ended(measured())
			return o
		}
		base, running := use("base"), m.Model("running")
		running.Move(StageNone, StageWaitsPlace)
		running.Move(StageWaitsPlace, StageRuns)
		var last *Model
		for round := range 5 {
			for i := range 200 {
				name := fmt.Sprintf("adapter-%d-%d", round, i)
				served[name] = true
				if last = use(name); last.Name != name {
					t.Fatalf("%s has the label %s", name, last.Name)
				}
			}
			for i := range 200 {
				delete(served, fmt.Sprintf("adapter-%d-%d", round, i))
			}
			time.Sleep(removeEvery)
		}
		if m.Model("base") != base || m.Model("running") != running {
			t.Error("a model that is served, or has a request, lost its instruments")
		}
		for range 300 { // no more than one search in removeEvery, and no room for all
			served[fmt.Sprint("new-", len(served))] = true
		}
		for name := range served {
			use(name)
		}
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			names := map[string]bool{}
			for _, metric := range f.Metric {
				for _, l := range metric.Label {
					if l.GetName() == "model" {
						names[l.GetValue()] = true
					}
				}
			}
			if len(names) > maxModels+1 {
				t.Errorf("%s has %d models", f.GetName(), len(names))
			}
			if names["adapter-0-0"] {
				t.Errorf("%s still has a model that has left", f.GetName())
			}
		}
		removed := m.Model("base")
		removed.gone.Store(true)
		before := testutil.CollectAndCount(m.exchanges)
		removed.Ended(ended(abi.FlowReject, OutcomeInternal))
		if n := testutil.CollectAndCount(m.exchanges); n != before {
			t.Error("a request that ends after the removal made a series")
		}
	})
}
