package attempt_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// detectTime is the maximum time after which a proxy with the configuration of a
// stopWorld knows that an engine does not respond.
const detectTime = 100*time.Millisecond + 3*200*time.Millisecond + 2*50*time.Millisecond

// retryTime is the maximum time between the detection and the answer to the next leg.
const retryTime = 120 * time.Millisecond

// stopWorld is a world with two engines of each role. The first engine of the role phase
// that gets a leg stops.
type stopWorld struct {
	*world.World
	connector string
	phase     string // the role
	answer    string // of prefill
	late      bool   // the engine stops after its answer
	begun     bool   // the engine stops after the begin of its stream
	alone     bool   // there is one engine of each role

	mu      sync.Mutex
	halted  *world.Engine   // guarded by mu
	at      time.Time       // guarded by mu; time of the stop
	proceed func()          // guarded by mu
	freed   []time.Time     // guarded by mu; times of the clean-up calls
	engines []*world.Engine // prefill, prefill, decode, decode
}

// halt stops e if it is the first of the phase.
func (h *stopWorld) halt(e *world.Engine) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.halted == nil && e.Role == h.phase {
		h.halted, h.at, h.proceed = e, time.Now(), sync.OnceFunc(e.Stop())
	}
}

// serve is the behaviour of each engine for a leg.
func (h *stopWorld) serve(c *world.Conn, _ int) {
	e := c.E
	if c.Leg.Path == "/abort_request" || strings.HasSuffix(c.Leg.Header.Get("X-Request-Id"), "-cleanup") {
		<-e.Stopped()
		h.mu.Lock()
		h.freed = append(h.freed, time.Now())
		h.mu.Unlock()
		c.JSON(200, "{}")
		return
	}
	if !h.late {
		h.halt(e)
	}
	if h.begun {
		c.Send(world.StreamHead)
		c.Chunks("data: " + world.DoneAnswer + "\n\n")
		<-e.Stopped()
		c.Chunks("data: "+world.DoneAnswer+"\n\n", "data: [DONE]\n\n")
		c.Send("0\r\n\r\n")
		return
	}
	<-e.Stopped()
	if e.Role == "prefill" {
		c.JSON(200, strings.Replace(h.answer, "p.test", e.Name+".test", 1))
		if h.late {
			h.halt(e)
		}
		return
	}
	time.Sleep(10 * time.Millisecond) // until prefill has received its leg and has answered
	h.fetch(c.Leg)
	if strings.Contains(c.Leg.Body, `"stream":true`) {
		c.Stream("data: "+world.DoneAnswer+"\n\n", "data: [DONE]\n\n")
		return
	}
	c.JSON(200, world.DoneAnswer)
}

// fetch reads the KV of prefill's leg during decode's leg. It waits for that leg.
func (h *stopWorld) fetch(decode world.Leg) {
	id := decode.Header.Get("X-Request-Id")
	for _, p := range h.engines {
		for _, leg := range p.Seen() {
			if p.Role == "prefill" && (id != "" && leg.Header.Get("X-Request-Id") == id || holds(p, decode)) {
				<-p.Stopped()
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
			h.engines = append(h.engines, &world.Engine{Name: role[:1] + n, Role: role, Connector: h.connector, Serve: h.serve})
		}
	}
	h.World = world.New(t, world.Setup{Engines: h.engines, Config: func(c *config.Config) {
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
func (h *stopWorld) request(stream bool) (world.Answer, time.Duration) {
	a := h.Post(world.CompletionsPath, world.Completions(stream))
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
		{"vllm-nixl", "prefill", world.NamedAnswer, 1, true},
		{"vllm-nixl", "decode", world.NamedAnswer, 1, true},
		{"vllm-moriio", "prefill", `{"kv_transfer_params":{}}`, 0, false}, // prefill writes the KV for which decode waits
		{"vllm-moriio", "decode", `{"kv_transfer_params":{}}`, 0, false},
		{"sglang", "prefill", world.DoneAnswer, 2, false}, // the call to decode arrives at once
		{"sglang", "decode", world.DoneAnswer, 1, true},
		{"trtllm", "prefill", world.TRTAnswer, 0, false},
		{"trtllm", "decode", world.TRTAnswer, 0, false},
		{"none", "both", "", 0, false},
	} {
		for _, stream := range []string{"stream", "whole"} {
			world.Run(t, tt.connector+" "+tt.phase+" "+stream, func(t *testing.T) {
				h := &stopWorld{connector: tt.connector, phase: tt.phase, answer: tt.answer}
				newStopWorld(t, h, nil)
				a, took := h.request(stream == "stream")
				if a.Status != 200 || a.Err != nil || !strings.Contains(a.Body, `"x"`) {
					t.Fatalf("got status %d, error %v: %s", a.Status, a.Err, a.Body)
				}
				if took > detectTime+retryTime {
					t.Errorf("answered %v after the engine had stopped, want less", took)
				}
				h.mu.Lock()
				name := h.halted.Name
				h.mu.Unlock()
				silent := 0
				for _, l := range h.Explained().Legs {
					if l.Engine == name && l.Error == "silent" {
						silent++
					}
				}
				if silent != 1 || h.Metric("pdproxy_leg_errors_total", name, "silent") != 1 {
					t.Errorf("got %d unresponsive legs: %+v", silent, h.Explained().Legs)
				}
				if f := h.Registry.Snapshot().Instance(name).Breaker.Failures(); f != 0 {
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
			world.Run(t, name+" "+phase, func(t *testing.T) {
				h := &stopWorld{connector: "vllm-nixl", phase: phase, answer: world.NamedAnswer, alone: tt.alone}
				newStopWorld(t, h, func(c *config.Config) { c.Retry = tt.retry })
				time.AfterFunc(20*time.Second, h.resume)
				if a, took := h.request(true); a.Status != 200 || took.Round(time.Second) != 20*time.Second {
					t.Errorf("got status %d after %v: %s", a.Status, took, a.Body)
				}
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
			h := &stopWorld{connector: "vllm-nixl", phase: "decode", answer: world.NamedAnswer, alone: true}
			newStopWorld(t, h, nil)
			time.AfterFunc(40*time.Second, h.resume)
			if a, took := h.request(stream); a.Status != 504 || took < 22*time.Second || took > 24*time.Second {
				t.Errorf("got status %d after %v: %s", a.Status, took, a.Body)
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
		world.Run(t, name, func(t *testing.T) {
			h := &stopWorld{connector: "vllm-nixl", phase: "decode", answer: world.NamedAnswer}
			newStopWorld(t, h, func(c *config.Config) {
				c.Retry.Attempts = 1
				c.Timeouts.Transfer, c.Timeouts.Handshake = config.Duration(tt.transfer), config.Duration(time.Millisecond)
			})
			ctx, leave := context.WithTimeout(t.Context(), tt.leaves)
			defer leave()
			if a := world.Ask(ctx, h.Client, "POST", "http://proxy"+world.CompletionsPath, world.Completions(true)); a.Status == 200 {
				t.Fatalf("the stopped engine answered: %s", a.Body)
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
	}
	world.Run(t, "the engine ends", func(t *testing.T) {
		h := &stopWorld{connector: "vllm-nixl", phase: "decode", answer: world.NamedAnswer}
		newStopWorld(t, h, func(c *config.Config) { c.Retry.Attempts = 1 })
		ctx, leave := context.WithTimeout(t.Context(), 8*time.Second)
		defer leave()
		world.Ask(ctx, h.Client, "POST", "http://proxy"+world.CompletionsPath, world.Completions(true))
		time.Sleep(5 * time.Second)
		if calls := h.calls(); len(calls) > 0 {
			t.Errorf("got a clean-up while the engine may resume")
		}
		h.halted.End()
		time.Sleep(5 * time.Second)
		if calls := h.calls(); len(calls) != 1 {
			t.Errorf("got %d clean-ups after the engine had ended, want 1", len(calls))
		}
	})
}

// TestSilentSourceIsLeft: decode waits for KV of an engine that stops. The proxy retries
// a stream that has not begun. It does not retry a whole answer, because decode may
// already compute it.
func TestSilentSourceIsLeft(t *testing.T) {
	for _, stream := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			h := &stopWorld{connector: "vllm-nixl", phase: "prefill", answer: world.NamedAnswer, late: true}
			newStopWorld(t, h, nil)
			time.AfterFunc(20*time.Second, h.resume)
			a, took := h.request(stream)
			if a.Status != 200 {
				t.Fatalf("got status %d: %s", a.Status, a.Body)
			}
			switch {
			case !stream && took.Round(time.Second) != 20*time.Second:
				t.Errorf("whole answer after %v", took)
			case stream && took > detectTime+retryTime:
				t.Errorf("stream after %v", took)
			case stream && (h.Metric("pdproxy_leg_errors_total", "decode", "kv_silent") != 1 || h.Metric("pdproxy_retries_total", "decode", "kv_silent") != 1):
				t.Errorf("legs %+v", h.Explained().Legs)
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
		if a.Status != 200 || a.Err != nil || strings.Count(a.Body, `"x"`) != 2 || took.Round(time.Second) != 20*time.Second {
			t.Errorf("got status %d after %v: %s", a.Status, took, a.Body)
		}
	})
}

// TestLateAnswerIsHeardBesideTheRetry: an attempt whose prefill hangs ends after
// timeouts.prefill. The proxy waits for prefill's late answer during the next attempt,
// and frees the blocks that the late answer names.
func TestLateAnswerIsHeardBesideTheRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := func(after time.Duration) func(*world.Conn, int) {
			return func(c *world.Conn, n int) {
				time.Sleep(after)
				world.PrefillAnswers(c, n)
			}
		}
		engines := []*world.Engine{
			{Name: "p0", Role: "prefill", Connector: "vllm-nixl", Serve: hang(2500 * time.Millisecond)},
			{Name: "d0", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.DoneAnswer) }},
		}
		w := world.New(t, world.Setup{Engines: engines, Config: func(c *config.Config) {
			c.Timeouts.Prefill, c.Retry.Attempts = config.Duration(time.Second), 3
		}})
		begin := time.Now()
		a := w.Post(world.CompletionsPath, world.Completions(false))
		if took := time.Since(begin); a.Status != 504 || took != 3*time.Second {
			t.Errorf("got status %d after %v, want 504 after three attempts of 1s: %s", a.Status, took, a.Body)
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if n := w.Metric("pdproxy_kv_cleanups_total", "vllm-nixl", "abort_decode"); n != 3 {
			t.Errorf("got the blocks of %v late answers freed, want 3", n)
		}
	})
}
