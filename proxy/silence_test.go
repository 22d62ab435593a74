package proxy

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// detectTime is the maximum time after which a proxy with the configuration of a
// stopWorld knows that an engine does not respond.
const detectTime = 100*time.Millisecond + 3*200*time.Millisecond + 2*50*time.Millisecond

// namedAnswer is an answer of prefill whose parameters contain the id of the request.
var namedAnswer = strings.Replace(nixlAnswer, `"remote_port"`, `"remote_request_id":"r","remote_port"`, 1)

// retryTime is the maximum time between the detection and the answer to the next leg.
const retryTime = 120 * time.Millisecond

// stopWorld is a world with two engines of each role. The first engine of the role phase
// that gets a leg stops.
type stopWorld struct {
	*world
	connector string
	phase     string // the role
	answer    string // of prefill
	late      bool   // the engine stops after its answer
	begun     bool   // the engine stops after the begin of its stream
	alone     bool   // there is one engine of each role

	mu      sync.Mutex
	halted  *fakeEngine   // guarded by mu
	at      time.Time     // guarded by mu; time of the stop
	proceed func()        // guarded by mu
	freed   []time.Time   // guarded by mu; times of the clean-up calls
	engines []*fakeEngine // prefill, prefill, decode, decode
}

// halt stops e if it is the first of the phase.
func (h *stopWorld) halt(e *fakeEngine) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.halted == nil && e.role == h.phase {
		h.halted, h.at, h.proceed = e, time.Now(), sync.OnceFunc(e.stop())
	}
}

// serve is the behaviour of each engine for a leg.
func (h *stopWorld) serve(c *engineConn, _ int) {
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
		c.send(streamHead)
		c.chunks("data: " + doneAnswer + "\n\n")
		<-e.stopped()
		c.chunks("data: "+doneAnswer+"\n\n", "data: [DONE]\n\n")
		c.send("0\r\n\r\n")
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
	time.Sleep(10 * time.Millisecond) // until prefill has received its leg and has answered
	h.fetch(c.leg)
	if strings.Contains(c.leg.body, `"stream":true`) {
		c.stream("data: "+doneAnswer+"\n\n", "data: [DONE]\n\n")
		return
	}
	c.json(200, doneAnswer)
}

// fetch reads the KV of prefill's leg during decode's leg. It waits for that leg.
func (h *stopWorld) fetch(decode seenLeg) {
	id := decode.header.Get("X-Request-Id")
	for _, p := range h.engines {
		for _, leg := range p.seen() {
			if p.role == "prefill" && (id != "" && leg.header.Get("X-Request-Id") == id || p.holds(decode)) {
				<-p.stopped()
			}
		}
	}
}

func newStopWorld(t *testing.T, h *stopWorld, edit func(*config.Config)) {
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
	t.Cleanup(h.resume)
	time.Sleep(time.Second) // the proxy has probed all engines
}

// calls returns the times of the clean-up calls.
func (h *stopWorld) calls() []time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.freed
}

// request sends a request. It returns the client's answer, and the time between the
// engine's stop and the answer.
func (h *stopWorld) request(stream bool) (answer, time.Duration) {
	a := h.post(completionsPath, completions(stream))
	took := time.Since(h.stoppedAt())
	synctest.Wait() // the journal contains the exchange
	return a, took
}

func (h *stopWorld) stoppedAt() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.at
}

// resume continues the engine, if it has stopped.
func (h *stopWorld) resume() {
	h.mu.Lock()
	proceed := h.proceed
	h.mu.Unlock()
	if proceed != nil {
		proceed()
	}
}

// TestSilentEngineIsLeft: an engine stops while a leg waits for it. As soon as the probes
// have detected the stop, another engine serves the leg, in each order of the legs. The
// proxy frees the blocks of the stopped engine after that engine has resumed, not before.
func TestSilentEngineIsLeft(t *testing.T) {
	for _, tt := range []struct {
		connector, phase, answer string
		freed                    int  // clean-up calls at the end
		back                     bool // the clean-up calls arrive after the engine has resumed
	}{
		{"vllm-nixl", "prefill", namedAnswer, 1, true},
		{"vllm-nixl", "decode", namedAnswer, 1, true},
		{"vllm-moriio", "prefill", `{"kv_transfer_params":{}}`, 0, false}, // prefill writes the KV for which decode waits
		{"vllm-moriio", "decode", `{"kv_transfer_params":{}}`, 0, false},
		{"sglang", "prefill", doneAnswer, 2, false}, // the call to decode arrives at once
		{"sglang", "decode", doneAnswer, 1, true},
		{"trtllm", "prefill", trtAnswer, 0, false},
		{"trtllm", "decode", trtAnswer, 0, false},
		{"none", "both", "", 0, false},
	} {
		for _, stream := range []string{"stream", "whole"} {
			t.Run(tt.connector+" "+tt.phase+" "+stream, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					h := &stopWorld{connector: tt.connector, phase: tt.phase, answer: tt.answer}
					newStopWorld(t, h, nil)
					a, took := h.request(stream == "stream")
					if a.status != 200 || a.err != nil || !strings.Contains(a.body, `"x"`) {
						t.Fatalf("got status %d, error %v: %s", a.status, a.err, a.body)
					}
					if took > detectTime+retryTime {
						t.Errorf("answered %v after the engine had stopped, want less", took)
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
						t.Errorf("got %d unresponsive legs: %+v", silent, h.explained().Legs)
					}
					if f := h.registry.Snapshot().Instance(name).Breaker.Failures(); f != 0 {
						t.Errorf("got %d failures of an engine whose stop the probes have detected", f)
					}
					time.Sleep(10 * time.Second)
					if n := len(h.calls()); tt.back && n > 0 {
						t.Errorf("got %d clean-ups before the engine resumed", n)
					}
					back := time.Now()
					h.resume()
					time.Sleep(5 * time.Second)
					if n := len(h.calls()); n != tt.freed {
						t.Fatalf("got %d clean-ups, want %d", n, tt.freed)
					}
					if tt.phase == "decode" && tt.back && tt.connector == "vllm-nixl" && h.calls()[0].Sub(back) < cleanup.Yield {
						t.Error("the clean-up arrived before the engine could have handled the abort")
					}
				})
			})
		}
	}
}

// TestSilentEngineIsWaitedFor: if no other engine can take the leg, the leg waits.
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
					h := &stopWorld{connector: "vllm-nixl", phase: phase, answer: namedAnswer, alone: tt.alone}
					newStopWorld(t, h, func(c *config.Config) { c.Retry = tt.retry })
					time.AfterFunc(20*time.Second, h.resume)
					if a, took := h.request(true); a.status != 200 || took.Round(time.Second) != 20*time.Second {
						t.Errorf("got status %d after %v: %s", a.status, took, a.body)
					}
				})
			})
		}
	}
}

// TestSilentDecodeOutlivesItsKV: a decode engine stops for so long that prefill may have
// given the blocks to another request. Then its answer is not used, even if no other
// engine can serve the request.
func TestSilentDecodeOutlivesItsKV(t *testing.T) {
	for _, stream := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			h := &stopWorld{connector: "vllm-nixl", phase: "decode", answer: namedAnswer, alone: true}
			newStopWorld(t, h, nil)
			time.AfterFunc(40*time.Second, h.resume)
			if a, took := h.request(stream); a.status != 504 || took < 22*time.Second || took > 24*time.Second {
				t.Errorf("got status %d after %v: %s", a.status, took, a.body)
			}
			time.Sleep(time.Minute) // the engine has resumed, and its leg was cancelled
		})
	}
}

// TestBlocksOfASilentDecode: the request ends while its decode engine does not respond, and no
// retry is made. The engine may read prefill's blocks when it resumes, so the proxy frees them
// only after that, also by another decode engine.
func TestBlocksOfASilentDecode(t *testing.T) {
	for name, tt := range map[string]struct{ leaves, transfer time.Duration }{
		"the client leaves at once":         {50 * time.Millisecond, time.Minute},
		"the client leaves":                 {8 * time.Second, time.Minute},
		"the KV does not arrive in time":    {time.Minute, 5 * time.Second},
		"neither before the probes know it": {time.Minute, 200 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := &stopWorld{connector: "vllm-nixl", phase: "decode", answer: namedAnswer}
				newStopWorld(t, h, func(c *config.Config) {
					c.Retry.Attempts = 1
					c.Timeouts.Transfer, c.Timeouts.Handshake = config.Duration(tt.transfer), config.Duration(time.Millisecond)
				})
				ctx, leave := context.WithTimeout(t.Context(), tt.leaves)
				defer leave()
				if a := ask(ctx, h.client, "POST", "http://proxy"+completionsPath, completions(true)); a.status == 200 {
					t.Fatalf("the stopped engine answered: %s", a.body)
				}
				time.Sleep(12 * time.Second)
				if calls := h.calls(); len(calls) > 0 {
					t.Errorf("got a clean-up %v after the stop, before the engine resumed", calls[0].Sub(h.stoppedAt()))
				}
				back := time.Now()
				h.resume()
				time.Sleep(5 * time.Second)
				if calls := h.calls(); len(calls) != 1 || calls[0].Sub(back) < cleanup.Yield {
					t.Errorf("got clean-ups at %v, want one after %v", calls, back.Add(cleanup.Yield))
				}
			})
		})
	}
	t.Run("the engine ends", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			h := &stopWorld{connector: "vllm-nixl", phase: "decode", answer: namedAnswer}
			newStopWorld(t, h, func(c *config.Config) { c.Retry.Attempts = 1 })
			ctx, leave := context.WithTimeout(t.Context(), 8*time.Second)
			defer leave()
			ask(ctx, h.client, "POST", "http://proxy"+completionsPath, completions(true))
			time.Sleep(5 * time.Second)
			if calls := h.calls(); len(calls) > 0 {
				t.Errorf("got a clean-up while the engine may resume")
			}
			h.halted.end()
			time.Sleep(5 * time.Second)
			if calls := h.calls(); len(calls) != 1 {
				t.Errorf("got %d clean-ups after the engine had ended, want 1", len(calls))
			}
		})
	})
}

// TestSilentSourceIsLeft: decode waits for KV of an engine that stops. The proxy retries
// a stream that has not begun. It does not retry a whole answer, because decode may
// already compute it.
func TestSilentSourceIsLeft(t *testing.T) {
	for _, stream := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			h := &stopWorld{connector: "vllm-nixl", phase: "prefill", answer: namedAnswer, late: true}
			newStopWorld(t, h, nil)
			time.AfterFunc(20*time.Second, h.resume)
			a, took := h.request(stream)
			if a.status != 200 {
				t.Fatalf("got status %d: %s", a.status, a.body)
			}
			switch {
			case !stream && took.Round(time.Second) != 20*time.Second:
				t.Errorf("whole answer after %v", took)
			case stream && took > detectTime+retryTime:
				t.Errorf("stream after %v", took)
			case stream && (h.metric("pdproxy_leg_errors_total", "decode", "kv_silent") != 1 || h.metric("pdproxy_retries_total", "decode", "kv_silent") != 1):
				t.Errorf("legs %+v", h.explained().Legs)
			}
			if len(h.calls()) > 0 {
				t.Error("clean-ups before the engine resumed")
			}
			time.Sleep(25 * time.Second)
			if n := len(h.calls()); stream != (n == 1) {
				t.Errorf("got %d clean-ups", n)
			}
		})
	}
}

// TestBegunStreamIsNotLeft: the proxy does not retry a stream of which the client has
// received a part.
func TestBegunStreamIsNotLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &stopWorld{connector: "none", phase: "both", begun: true}
		newStopWorld(t, h, nil)
		time.AfterFunc(20*time.Second, h.resume)
		a, took := h.request(true)
		if a.status != 200 || a.err != nil || strings.Count(a.body, `"x"`) != 2 || took.Round(time.Second) != 20*time.Second {
			t.Errorf("got status %d after %v: %s", a.status, took, a.body)
		}
	})
}

// TestLateAnswerIsHeardBesideTheRetry: an attempt whose prefill hangs ends after
// timeouts.prefill. The proxy waits for prefill's late answer during the next attempt,
// and frees the blocks that the late answer names.
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
			t.Errorf("got status %d after %v, want 504 after three attempts of 1s: %s", a.status, took, a.body)
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if n := w.metric("pdproxy_kv_cleanups_total", "vllm-nixl", "abort_decode"); n != 3 {
			t.Errorf("got the blocks of %v late answers freed, want 3", n)
		}
	})
}
