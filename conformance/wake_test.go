package conformance

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// wakingFleet is a fleet whose requests wake its engines.
type wakingFleet struct {
	*fleet
	byName map[string]*enginesim.Engine
	next   config.Config // of the next reload
}

func startWakingFleet(t *testing.T, connector string) *wakingFleet {
	f := startFleet(t, connector, fleetOptions{
		engine: func(_ string, _ int, c *enginesim.Config) { c.DevMode = true },
		config: func(c *config.Config) {
			c.Health.LoadInterval = config.Duration(20 * time.Millisecond)
			c.Limits.NoEngineTimeout = config.Duration(time.Minute)
			c.Sleep.Wake = true
		},
	})
	return &wakingFleet{fleet: f, next: f.cfg, byName: map[string]*enginesim.Engine{
		"p0": f.prefill[0], "p1": f.prefill[1], "d0": f.decode[0], "d1": f.decode[1],
	}}
}

// shown reports whether the engines p0, p1, d0 and d1 are shown in these states.
func (f *wakingFleet) shown(states string) bool {
	engines := f.front.engines()
	return fmt.Sprintf("%s %s %s %s", engines["p0"], engines["p1"], engines["d0"], engines["d1"]) == states
}

func (f *wakingFleet) become(states string) {
	f.t.Helper()
	f.eventually("the engines are "+states, func() bool { return f.shown(states) })
}

// sleepAll puts the engines to sleep as an operator does, and waits until all processes know.
func (f *wakingFleet) sleepAll(level int) {
	f.t.Helper()
	for _, e := range f.byName {
		e.Sleep(level, true)
	}
	for name := range f.byName {
		f.eventually(name+" is asleep", func() bool { return f.engineState(name) == "asleep" })
	}
}

// serve sends requests at the same time, which get right answers.
func (f *wakingFleet) serve(n int) {
	f.t.Helper()
	answers, bodies := make([]answer, n), make([]string, n)
	var all sync.WaitGroup
	for i := range n {
		bodies[i] = chat(fmt.Sprintf("%d: %s", i, long), 4, i%2 == 0)
		all.Go(func() { answers[i] = f.try(chatPath, bodies[i]) })
	}
	all.Wait()
	for i := range n {
		f.right(answers[i], chatPath, bodies[i])
	}
}

func (f *wakingFleet) change(change func(c *config.Config)) {
	f.t.Helper()
	change(&f.next)
	if err := f.reload(&f.next); err != nil {
		f.t.Fatal(err)
	}
	f.awaitWorkers()
}

func (f *wakingFleet) wakes(result string) float64 {
	return f.metric("pdproxy_engine_wakes_total", `result="`+result+`"`)
}

// TestRequestsWakeEngines: requests for a model whose engines sleep wake one prefill and one decode
// engine, once. They wait, and the explanation says so.
func TestRequestsWakeEngines(t *testing.T) {
	for _, connector := range []string{enginesim.ConnectorVLLMNixl, enginesim.ConnectorVLLMMooncake} {
		t.Run(connector, func(t *testing.T) {
			f := startWakingFleet(t, connector)
			f.sleepAll(1)
			if a := f.call(http.MethodGet, "/health"); a.status != 200 {
				t.Errorf("/health is %d while requests can wake the engines", a.status)
			}
			f.serve(20)
			f.become("ready asleep ready asleep")
			if n := f.wakes("ok"); n != 2 || f.metric("pdproxy_engine_wake_seconds_count") != 2 {
				t.Errorf("%v engines were woken", n)
			}
			f.prefill[0].Sleep(1, true)
			f.eventually("p0 sleeps again", func() bool { return f.engineState("p0") == "asleep" })
			e := f.explained("wakes-"+connector, `{"model":"sim","prompt":"wakes","max_tokens":3,"ignore_eos":true}`)
			if notes := strings.Join(e.Notes, "; "); !strings.Contains(notes, "the engines of the model slept: the request waited for ") {
				t.Errorf("the explanation has the notes %q", notes)
			}
			f.become("ready asleep ready asleep")
			for _, e := range f.byName {
				e.WakeUp()
			}
			f.become("ready ready ready ready")
		})
	}
}

// TestWakesThatFail: an engine that refuses or dies is not woken in place of another one, and the
// client learns why it waited in vain. A client that leaves keeps no engine asleep. Engines without
// weights stay asleep.
func TestWakesThatFail(t *testing.T) {
	f := startWakingFleet(t, enginesim.ConnectorVLLMNixl)
	fault := func(fail, hang string, engines ...*enginesim.Engine) {
		t.Helper()
		for _, e := range engines {
			if err := e.SetFault(fail, 0, hang); err != nil {
				t.Fatal(err)
			}
		}
	}
	inVain := func() {
		t.Helper()
		a := f.try(chatPath, chat("in vain", 4, false))
		if a.status != 503 || !strings.Contains(a.body, `"code":"no_engine_timeout"`) || !strings.Contains(a.body, "and none woke in time") || a.header.Get("Retry-After") == "" {
			t.Errorf("got %d %v %s", a.status, a.header, a.body)
		}
	}

	f.sleepAll(1)
	fault("1:sleep", "", f.prefill[0])
	f.serve(4)
	f.become("asleep ready ready asleep")
	if f.wakes("refused") < 1 {
		t.Error("the refusal is not counted")
	}

	f.sleepAll(1)
	fault("", "sleep", f.prefill...)
	f.change(func(c *config.Config) { c.Limits.NoEngineTimeout = config.Duration(300 * time.Millisecond) })
	inVain()
	dies, other := "p0", "p1" // the one that is being woken, and the other one
	if f.front.engines()[other] == "waking" {
		dies, other = other, dies
	}
	if engines := f.front.engines(); engines[dies] != "waking" || engines[other] != "asleep" {
		t.Errorf("the engines are %v", engines)
	}
	f.change(func(c *config.Config) { c.Limits.NoEngineTimeout = config.Duration(time.Minute) })
	ctx, leave := context.WithCancel(context.Background())
	left := make(chan answer, 1)
	go func() { left <- f.post(ctx, f.url, chatPath, chat("leaves", 4, false)) }()
	f.eventually("a request waits", func() bool { return f.metric("pdproxy_requests_waiting") > 0 })
	leave()
	<-left
	fault("", "", f.prefill...)
	f.byName[dies].Kill() // in the middle of the call
	f.serve(4)
	if f.wakes("no_answer") != 1 || f.engineState(other) != "ready" {
		t.Errorf("%v wakes without an answer; the engines are %v", f.wakes("no_answer"), f.front.engines())
	}

	delete(f.byName, dies)
	f.sleepAll(2)
	before := f.metric("pdproxy_engine_wakes_total")
	f.change(func(c *config.Config) { c.Limits.NoEngineTimeout = config.Duration(300 * time.Millisecond) })
	inVain()
	if n := f.metric("pdproxy_engine_wakes_total") - before; n != 0 {
		t.Errorf("%v engines without weights were woken", n)
	}
}

// TestIdleEnginesSleep: the engines of a model that nobody uses fall asleep and hold no KV, and
// requests wake them. An engine that refuses stays in service.
func TestIdleEnginesSleep(t *testing.T) {
	f := startWakingFleet(t, enginesim.ConnectorVLLMNixl)
	f.serve(4)
	if err := f.decode[1].SetFault("1:sleep", 0, ""); err != nil {
		t.Fatal(err)
	}
	f.change(func(c *config.Config) { c.Sleep.After = config.Duration(300 * time.Millisecond) })
	f.eventually("three engines sleep", func() bool { return f.shown("asleep asleep asleep ready") })
	f.eventually("the refusal is counted", func() bool { return f.metric("pdproxy_engine_sleeps_total", `result="refused"`) >= 1 })
	if n := f.metric("pdproxy_engine_sleeps_total", `result="ok"`); n != 3 {
		t.Errorf("%v engines were put to sleep", n)
	}
	if n := f.metric("pdproxy_engine_asleep"); n != 3 {
		t.Errorf("%v engines are shown as asleep", n)
	}
	f.serve(8)
	if f.wakes("ok") < 1 || f.metric("pdproxy_engine_sleeps_total", `engine="d1"`, `result="ok"`) != 0 {
		t.Errorf("%v engines were woken", f.wakes("ok"))
	}
	// A stream keeps its engines awake, although nothing else uses the model.
	body := chat("a stream "+long, 200, true)
	f.decode[0].SetDecodeUsPerToken(10_000)
	f.decode[1].SetDecodeUsPerToken(10_000)
	f.right(f.try(chatPath, body), chatPath, body)
	f.change(func(c *config.Config) { c.Sleep.After = 0 })
	for _, e := range f.byName {
		if err := e.SetFault("", 0, ""); err != nil {
			t.Fatal(err)
		}
		e.WakeUp()
	}
}
