package exchange_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// planner is a Decider whose plan answer a test gives.
type planner struct {
	world.Decider
	answer abi.PlanAnswer
}

func (p *planner) Plan(context.Context, *abi.PlanFacts) (abi.PlanAnswer, string, bool) {
	return p.answer, "planner", true
}

// The plan policy can limit the time of an attempt until the client's first byte, over
// all legs. At the limit no engine is charged with a failure.
func TestPlanLimit(t *testing.T) {
	slow := func(d time.Duration, then func(*world.Conn, int)) func(*world.Conn, int) {
		return func(c *world.Conn, nth int) { time.Sleep(d); then(c, nth) }
	}
	answers := func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }
	streams := func(c *world.Conn, _ int) {
		c.Send(world.StreamHead)
		c.Chunks(": wait\n\n")
		time.Sleep(2 * time.Second)
		c.Chunks(world.EventA)
		time.Sleep(10 * time.Second) // the limit applies to the first byte
		c.Chunks(world.Done)
		c.Send("0\r\n\r\n")
	}
	tests := []struct {
		name            string
		prefill, decode func(*world.Conn, int) // no prefill: aggregated
		stream          bool
		limit           uint32
		status          int
		took            time.Duration
	}{
		{"in time", slow(2*time.Second, world.PrefillAnswers), slow(2*time.Second, answers), false, 5000, 200, 4 * time.Second},
		{"together too slow", slow(3*time.Second, world.PrefillAnswers), slow(3*time.Second, answers), false, 5000, 504, 5 * time.Second},
		{"prefill too slow", slow(9*time.Second, world.PrefillAnswers), answers, false, 5000, 504, 5 * time.Second},
		{"aggregated", nil, slow(9*time.Second, answers), false, 5000, 504, 5 * time.Second},
		{"stream, in time", nil, streams, true, 5000, 200, 12 * time.Second},
		{"stream, too slow", nil, streams, true, 1500, 504, 1500 * time.Millisecond},
		{"longer than configured", nil, slow(1000*time.Second, answers), false, 999000, 504, 300 * time.Second},
	}
	for _, tt := range tests {
		world.Run(t, tt.name, func(t *testing.T) {
			engines := []*world.Engine{{Serve: tt.decode}}
			decision := abi.PlanAggregate
			if tt.prefill != nil {
				decision = abi.PlanDisaggregate
				engines = []*world.Engine{
					{Name: "p0", Role: "prefill", Connector: "vllm-nixl", Serve: tt.prefill},
					{Name: "d0", Role: "decode", Connector: "vllm-nixl", Serve: tt.decode},
				}
			}
			w := world.New(t, world.Setup{Engines: engines, Config: func(c *config.Config) { c.Retry.Attempts = 1 }})
			w.Local.SetDecider(&planner{answer: abi.PlanAnswer{Decision: decision, LimitMillis: tt.limit}})
			begin := time.Now()
			a := w.Post(world.CompletionsPath, world.Completions(tt.stream))
			if took := time.Since(begin); a.Status != tt.status || took != tt.took {
				t.Errorf("after %v: %+v", took, a)
			}
			for _, i := range w.Registry.Snapshot().Instances {
				if n := i.Breaker.Failures(); n != 0 && tt.limit < 300000 {
					t.Errorf("failures of %s: got %d", i.Spec.Name, n)
				}
			}
		})
	}
}

func TestPlanRejects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := world.New(t, world.Setup{Engines: []*world.Engine{{}}})
		w.Local.SetDecider(&planner{answer: abi.PlanAnswer{Decision: abi.PlanReject, Status: 429}})
		a := w.Post(world.CompletionsPath, world.Completions(false))
		if a.Status != 429 || a.Header.Get("Retry-After") == "" || !strings.Contains(a.Body, "rejected_by_policy") {
			t.Errorf("%+v", a)
		}
		w.Outcome(telemetry.OutcomeNoTarget)
	})
}
