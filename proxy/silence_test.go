package proxy

import (
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// noticed is within what an engine that falls silent is known by the configuration
// of a halting.
const noticed = 100*time.Millisecond + 3*200*time.Millisecond + 2*50*time.Millisecond

// namedAnswer is prefill's of an engine whose params name its request.
var namedAnswer = strings.Replace(nixlAnswer, `"remote_port"`, `"remote_request_id":"r","remote_port"`, 1)

// leaveSoon is what may pass between that and the next leg, and until its answer.
const leaveSoon = 120 * time.Millisecond

// halting is a world of two engines of each role, where the first that gets a leg of
// a phase stops.
type halting struct {
	*world
	connector string
	phase     string // the role
	answer    string // of prefill
	late      bool   // it stops when it has answered
	begun     bool   // it stops when its stream has begun
	alone     bool   // there is one engine of each role

	mu      sync.Mutex
	halted  *fakeEngine   // guarded by mu
	at      time.Time     // guarded by mu; when it stopped
	proceed func()        // guarded by mu
	freed   []time.Time   // guarded by mu; when clean-up calls came
	engines []*fakeEngine // prefill, prefill, decode, decode
}

// halt stops e if it is the first of the phase.
func (h *halting) halt(e *fakeEngine) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.halted == nil && e.role == h.phase {
		h.halted, h.at, h.proceed = e, time.Now(), sync.OnceFunc(e.stop())
	}
}

// serve is what each engine does with a leg.
func (h *halting) serve(c *engineConn, _ int) {
	e := c.e
	if c.leg.path == "/abort_request" || strings.HasSuffix(c.leg.header.Get("X-Request-Id"), "-cleanup") {
		<-e.stopped()
		h.mu.Lock()
		h.freed = append(h.freed, time.Now())
		h.mu.Unlock()
		c.json(200, "{}")
		return
	}
	if !h.late {
		h.halt(e)
	}
	if h.begun {
		c.say(streamHead)
		c.chunks("data: " + doneAnswer + "\n\n")
		<-e.stopped()
		c.chunks("data: "+doneAnswer+"\n\n", "data: [DONE]\n\n")
		c.say("0\r\n\r\n")
		return
	}
	<-e.stopped()
	if e.role == "prefill" {
		c.json(200, strings.Replace(h.answer, "p.test", e.name+".test", 1))
		if h.late {
			h.halt(e)
		}
		return
	}
	time.Sleep(10 * time.Millisecond) // until prefill has its leg, and has answered
	h.fetch(c.leg)
	if strings.Contains(c.leg.body, `"stream":true`) {
		c.stream("data: "+doneAnswer+"\n\n", "data: [DONE]\n\n")
		return
	}
	c.json(200, doneAnswer)
}

// fetch waits for the KV of prefill's leg beside decode's.
func (h *halting) fetch(decode seenLeg) {
	id := decode.header.Get("X-Request-Id")
	for _, p := range h.engines {
		for _, leg := range p.seen() {
			if p.role == "prefill" && (id != "" && leg.header.Get("X-Request-Id") == id || p.holds(decode)) {
				<-p.stopped()
			}
		}
	}
}

func newHalting(t *testing.T, h *halting, edit func(*config.Config)) {
	roles := []string{"prefill", "decode"}
	if h.phase == "both" {
		roles = []string{"both"}
	}
	for _, role := range roles {
		for _, n := range []string{"0", "1"} {
			if h.alone && n == "1" {
				continue
			}
			h.engines = append(h.engines, &fakeEngine{name: role[:1] + n, role: role, connector: h.connector, serve: h.serve})
		}
	}
	h.world = newWorld(t, setup{engines: h.engines, config: func(c *config.Config) {
		c.Health = config.Health{
			Interval: config.Duration(100 * time.Millisecond), Timeout: config.Duration(200 * time.Millisecond),
			SuspectInterval: config.Duration(50 * time.Millisecond), UnhealthyAfter: 3, HealthyAfter: 1,
		}
		if edit != nil {
			edit(c)
		}
	}})
	t.Cleanup(h.goesOn)
	time.Sleep(time.Second) // all have been heard
}

// calls is when clean-up calls came.
func (h *halting) calls() []time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.freed
}

// asks sends a request and returns what the client got, and how long after the engine
// had stopped.
func (h *halting) asks(stream bool) (answer, time.Duration) {
	a := h.post(completionsPath, completions(stream))
	took := time.Since(h.stoppedAt())
	synctest.Wait() // the exchange is in the books
	return a, took
}

func (h *halting) stoppedAt() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.at
}

// goesOn has the engine go on, if it has stopped.
func (h *halting) goesOn() {
	h.mu.Lock()
	proceed := h.proceed
	h.mu.Unlock()
	if proceed != nil {
		proceed()
	}
}

// TestSilentEngineIsLeft: whatever the order of the legs, one that waits for an engine
// which stops is answered by another as soon as probes can know; what the engine then
// holds is freed when it is back, not before.
func TestSilentEngineIsLeft(t *testing.T) {
	for _, tt := range []struct {
		connector, phase, answer string
		freed                    int  // clean-up calls in the end
		back                     bool // they come when it is back
	}{
		{"vllm-nixl", "prefill", namedAnswer, 1, true},
		{"vllm-nixl", "decode", namedAnswer, 1, true},
		{"vllm-moriio", "prefill", `{"kv_transfer_params":{}}`, 0, false}, // it writes what decode waits for
		{"vllm-moriio", "decode", `{"kv_transfer_params":{}}`, 0, false},
		{"sglang", "prefill", doneAnswer, 2, false}, // decode's at once
		{"sglang", "decode", doneAnswer, 1, true},
		{"trtllm", "prefill", trtAnswer, 0, false},
		{"trtllm", "decode", trtAnswer, 0, false},
		{"none", "both", "", 0, false},
	} {
		for _, stream := range []string{"stream", "whole"} {
			t.Run(tt.connector+" "+tt.phase+" "+stream, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					h := &halting{connector: tt.connector, phase: tt.phase, answer: tt.answer}
					newHalting(t, h, nil)
					a, took := h.asks(stream == "stream")
					if a.status != 200 || a.err != nil || !strings.Contains(a.body, `"x"`) {
						t.Fatalf("status %d, %v: %s", a.status, a.err, a.body)
					}
					if took > noticed+leaveSoon {
						t.Errorf("answered %v after the engine had stopped", took)
					}
					h.mu.Lock()
					name := h.halted.name
					h.mu.Unlock()
					silent := 0
					for _, l := range h.explained().Legs {
						if l.Engine == name && l.Error == "silent" {
							silent++
						}
					}
					if silent != 1 || h.metric("pdproxy_leg_errors_total", name, "silent") != 1 {
						t.Errorf("%d silent legs: %+v", silent, h.explained().Legs)
					}
					if f := h.registry.Snapshot().Instance(name).Breaker.Failures(); f != 0 {
						t.Errorf("%d failures for the circuit of an engine that probes tell of", f)
					}
					time.Sleep(10 * time.Second)
					if n := len(h.calls()); tt.back && n > 0 {
						t.Errorf("%d clean-ups before it is back", n)
					}
					back := time.Now()
					h.goesOn()
					time.Sleep(5 * time.Second)
					if n := len(h.calls()); n != tt.freed {
						t.Fatalf("%d clean-ups, want %d", n, tt.freed)
					}
					if tt.phase == "decode" && tt.back && tt.connector == "vllm-nixl" && h.calls()[0].Sub(back) < cleanup.Yield {
						t.Error("its own abort has not been waited for")
					}
				})
			})
		}
	}
}

// TestSilentEngineIsWaitedFor: where a leg could not be tried elsewhere it waits.
func TestSilentEngineIsWaitedFor(t *testing.T) {
	for name, tt := range map[string]struct {
		alone bool
		retry config.Retry
	}{
		"no try is left":   {false, config.Retry{Attempts: 1, MinBudget: 10}},
		"no retry is left": {false, config.Retry{Attempts: 3}},
		"nobody else":      {true, config.Retry{Attempts: 3, MinBudget: 10}},
	} {
		for _, phase := range []string{"prefill", "decode"} {
			t.Run(name+" "+phase, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					h := &halting{connector: "vllm-nixl", phase: phase, answer: namedAnswer, alone: tt.alone}
					newHalting(t, h, func(c *config.Config) { c.Retry = tt.retry })
					time.AfterFunc(20*time.Second, h.goesOn)
					if a, took := h.asks(true); a.status != 200 || took.Round(time.Second) != 20*time.Second {
						t.Errorf("status %d after %v: %s", a.status, took, a.body)
					}
				})
			})
		}
	}
}

// TestSilentDecodeOutlivesItsKV: a decode that is silent until prefill's blocks may be
// another's does not get to answer from them, though nobody can take its place.
func TestSilentDecodeOutlivesItsKV(t *testing.T) {
	for _, stream := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			h := &halting{connector: "vllm-nixl", phase: "decode", answer: namedAnswer, alone: true}
			newHalting(t, h, nil)
			time.AfterFunc(40*time.Second, h.goesOn)
			if a, took := h.asks(stream); a.status != 504 || took < 22*time.Second || took > 24*time.Second {
				t.Errorf("status %d after %v: %s", a.status, took, a.body)
			}
			time.Sleep(time.Minute) // it is back, and its leg was withdrawn
		})
	}
}

// TestSilentSourceIsLeft: a stream that waits for the KV of an engine which stops is
// begun anew. A whole answer may be under way, and is waited for.
func TestSilentSourceIsLeft(t *testing.T) {
	for _, stream := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			h := &halting{connector: "vllm-nixl", phase: "prefill", answer: namedAnswer, late: true}
			newHalting(t, h, nil)
			time.AfterFunc(20*time.Second, h.goesOn)
			a, took := h.asks(stream)
			if a.status != 200 {
				t.Fatalf("status %d: %s", a.status, a.body)
			}
			switch {
			case !stream && took.Round(time.Second) != 20*time.Second:
				t.Errorf("a whole answer came after %v", took)
			case stream && took > noticed+leaveSoon:
				t.Errorf("a stream came after %v", took)
			case stream && (h.metric("pdproxy_leg_errors_total", "decode", "kv_silent") != 1 || h.metric("pdproxy_retries_total", "decode", "kv_silent") != 1):
				t.Errorf("legs %+v", h.explained().Legs)
			}
			if len(h.calls()) > 0 {
				t.Error("clean-ups before it is back")
			}
			time.Sleep(25 * time.Second)
			if n := len(h.calls()); stream != (n == 1) {
				t.Errorf("%d clean-ups", n)
			}
		})
	}
}

// TestBegunStreamIsNotLeft: what the client has seen cannot begin anew.
func TestBegunStreamIsNotLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &halting{connector: "none", phase: "both", begun: true}
		newHalting(t, h, nil)
		time.AfterFunc(20*time.Second, h.goesOn)
		a, took := h.asks(true)
		if a.status != 200 || a.err != nil || strings.Count(a.body, `"x"`) != 2 || took.Round(time.Second) != 20*time.Second {
			t.Errorf("status %d after %v: %s", a.status, took, a.body)
		}
	})
}

// TestLateAnswerIsHeardBesideTheRetry: an attempt whose prefill hangs ends when
// timeouts.prefill is over. The prefill's late answer is awaited beside the next
// attempt, and the blocks that it names are freed.
func TestLateAnswerIsHeardBesideTheRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := func(after time.Duration) func(*engineConn, int) {
			return func(c *engineConn, n int) {
				time.Sleep(after)
				prefillAnswers(c, n)
			}
		}
		engines := []*fakeEngine{
			{name: "p0", role: "prefill", connector: "vllm-nixl", serve: hang(2500 * time.Millisecond)},
			{name: "d0", role: "decode", connector: "vllm-nixl", serve: func(c *engineConn, _ int) { c.json(200, doneAnswer) }},
		}
		w := newWorld(t, setup{engines: engines, config: func(c *config.Config) {
			c.Timeouts.Prefill, c.Retry.Attempts = config.Duration(time.Second), 3
		}})
		begin := time.Now()
		a := w.post(completionsPath, completions(false))
		if took := time.Since(begin); a.status != 504 || took != 3*time.Second {
			t.Errorf("status %d after %v, want 504 after three attempts of 1s: %s", a.status, took, a.body)
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if n := w.metric("pdproxy_kv_cleanups_total", "vllm-nixl", "abort_decode"); n != 3 {
			t.Errorf("%v of 3 late answers were freed", n)
		}
	})
}
