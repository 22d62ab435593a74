package core

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
)

// Kinds of fault that Config.Fail names.
const (
	Fail500      = "500"               // status 500 before the body is read
	Fail503      = "503"               // status 503
	Fail429      = "429"               // status 429
	Fail400      = "400"               // status 400
	FailBusy     = "busy"              // the engine's own refusal for lack of room, status 503
	FailReset    = "reset"             // RST before any answer
	FailClose    = "close"             // FIN before any answer
	FailCut      = "cut"               // the answer is cut in its middle, then RST
	FailGarbage  = "garbage"           // 200 with a malformed answer
	FailSlow     = "slow"              // half a second before the request is admitted
	FailLoad     = "load"              // the KV transfer fails on the receiving engine
	FailSSEError = "sse-error"         // an error event in the middle of a stream; unary 500
	FailNoParams = "no-params"         // a prefill answers 200 without transfer parameters
	FailNotify   = "lost-notification" // vllm-moriio: the engine's notification to its peer is lost
	FailSleep    = "sleep"             // vllm: /sleep and /wake_up fail with status 500
)

// FailKinds are all kinds of fault.
var FailKinds = []string{Fail500, Fail503, Fail429, Fail400, FailBusy, FailReset, FailClose, FailCut, FailGarbage, FailSlow, FailLoad, FailSSEError, FailNoParams, FailNotify, FailSleep}

// Phases in which Config.Hang makes requests hang until the client leaves.
const (
	HangPrefill = "prefill" // before computing the prompt
	HangDecode  = "decode"  // before the next output token
	HangHead    = "head"    // accepted, never answered
	HangStream  = "stream"  // after a few stream events
	HangConnect = "connect" // connections are accepted and never read
	HangSleep   = "sleep"   // vllm: /sleep and /wake_up are never answered, and have no effect
)

// HangPhases are all phases.
var HangPhases = []string{HangPrefill, HangDecode, HangHead, HangStream, HangConnect, HangSleep}

// StreamEventsBeforeFault is the number of events of a stream before the faults
// cut, sse-error and stream hang.
const StreamEventsBeforeFault = 3

// faults decides which requests get a fault. It is safe for concurrent use.
type faults struct {
	hangs atomic.Value // string, the phase that hangs
	hung  atomic.Int32 // requests that hang now

	mu       sync.Mutex
	rate     float64
	kind     string
	dieAfter int
	seen     int
	rng      *rand.Rand
	stopped  chan struct{} // guarded by mu; closed when the engine continues; nil: it runs
}

// stop makes the engine stop, or continue.
func (f *faults) stop(stopped bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case stopped && f.stopped == nil:
		f.stopped = make(chan struct{})
	case !stopped && f.stopped != nil:
		close(f.stopped)
		f.stopped = nil
	}
}

// Await waits until the engine runs, even if the request ends in the meantime:
// a stopped engine notices nothing.
func (f *faults) Await() {
	f.mu.Lock()
	stopped := f.stopped
	f.mu.Unlock()
	if stopped != nil {
		<-stopped
	}
}

// newFaults checks the fault fields of a config.
func newFaults(cfg Config) (*faults, error) {
	f := &faults{rng: rand.New(rand.NewPCG(cfg.Seed, 1))}
	return f, f.set(cfg.Fail, cfg.DieAfter, cfg.Hang)
}

// set replaces all faults; on an error nothing changes.
func (f *faults) set(fail string, dieAfter int, hang string) error {
	rate, kind := 0.0, ""
	if fail != "" {
		text, k, ok := strings.Cut(fail, ":")
		v, err := strconv.ParseFloat(text, 64)
		if !ok || err != nil || !(v >= 0 && v <= 1) || !slices.Contains(FailKinds, k) {
			return fmt.Errorf("fault fail: %q is not RATE:KIND with KIND in %s", fail, strings.Join(FailKinds, ", "))
		}
		rate, kind = v, k
	}
	if hang != "" && !slices.Contains(HangPhases, hang) {
		return fmt.Errorf("fault hang: %q is not one of %s", hang, strings.Join(HangPhases, ", "))
	}
	if dieAfter < 0 {
		return errors.New("fault die_after: negative")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rate, f.kind, f.dieAfter, f.seen = rate, kind, dieAfter, 0
	f.hangs.Store(hang)
	return nil
}

// Draw counts a request. It returns the fault of the request ("" for none) and whether
// the fault ends the engine.
func (f *faults) Draw() (kind string, die bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seen++
	if f.dieAfter > 0 && f.seen > f.dieAfter {
		return "", true
	}
	if f.kind != "" && f.rng.Float64() < f.rate {
		return f.kind, false
	}
	return "", false
}

// hanging reports whether the phase hangs now.
func (f *faults) hanging(phase string) bool { return f.hangs.Load() == phase }

// FailsSleep reports whether a call of the sleep mode fails.
func (f *faults) FailsSleep() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.kind == FailSleep && f.rng.Float64() < f.rate
}

// HangsSleep waits until the engine runs. Then, if calls of the sleep mode hang, it blocks until ctx
// ends.
func (f *faults) HangsSleep(ctx context.Context) error { return f.hang(ctx, HangSleep) }

// hang waits until the engine runs. Then, if the phase hangs, it blocks until
// ctx ends.
func (f *faults) hang(ctx context.Context, phase string) error {
	f.Await()
	if !f.hanging(phase) {
		return nil
	}
	f.hung.Add(1)
	defer f.hung.Add(-1)
	<-ctx.Done()
	return context.Cause(ctx)
}
