package core

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Parts of a sleeping engine that POST /wake_up can wake one by one.
const (
	partWeights = "weights"
	partKVCache = "kv_cache"
)

// ErrSlept is the cause of sequences that POST /sleep aborted.
var ErrSlept = errors.New("engine sleeps")

// sleeper is the sleep mode of vLLM. A sleeping engine answers its probes and accepts requests, but
// schedules none before it is awake again. Source: vLLM entrypoints/serve/dev/sleep/api_router.py,
// v1/engine/async_llm.py (sleep, wake_up), v1/engine/core.py (pause_scheduler, sleep, wake_up). The
// zero value is awake. Safe for concurrent use.
type sleeper struct {
	paused atomic.Bool // the scheduler takes no sequence

	mu     sync.Mutex
	asleep []string // parts without memory; guarded by mu
	// state is the label of vllm:engine_sleep_state whose value is 1; "" is awake; guarded by mu.
	state string
	runs  map[*sleepable]struct{} // sequences in the engine core; guarded by mu
}

// sleepable is a sequence that POST /sleep can abort.
type sleepable struct {
	cancel context.CancelCauseFunc
	ended  chan struct{}
}

// sleepStates are the values of the label sleep_state. Source: vLLM v1/metrics/loggers.py
// (record_sleep_state).
var sleepStates = []string{"awake", "weights_offloaded", "discard_all"}

// Watch returns a context that ends with cause ErrSlept if the engine begins to sleep. The caller
// calls end after the sequence.
func (z *sleeper) Watch(ctx context.Context) (watched context.Context, end func()) {
	watched, cancel := context.WithCancelCause(ctx)
	r := &sleepable{cancel, make(chan struct{})}
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.runs == nil {
		z.runs = make(map[*sleepable]struct{})
	}
	z.runs[r] = struct{}{}
	return watched, func() {
		z.mu.Lock()
		delete(z.runs, r)
		z.mu.Unlock()
		cancel(nil)
		close(r.ended)
	}
}

// gauge returns the value of vllm:engine_sleep_state for a state.
func (z *sleeper) gauge(state string) int {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.state == state || z.state == "" && state == sleepStates[0] {
		return 1
	}
	return 0
}

// Sleep does what POST /sleep does: it pauses the scheduler, aborts all sequences or waits for them,
// and waits until no KV is held for a transfer. From level 1 on, the prefix cache is empty afterwards.
func (e *Engine) Sleep(level int, abort bool) {
	z := &e.Sleeper
	z.paused.Store(true)
	z.mu.Lock()
	runs := make([]*sleepable, 0, len(z.runs))
	for r := range z.runs {
		runs = append(runs, r)
		if abort {
			r.cancel(ErrSlept)
		}
	}
	z.mu.Unlock()
	for _, r := range runs {
		<-r.ended
	}
	for e.holdsKV() && !e.HasEnded() {
		time.Sleep(sleepPoll)
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	z.state = "asleep" // of level 0: no sample is 1
	if level > 0 {
		e.ResetCache()
		z.asleep = []string{partWeights, partKVCache}
		z.state = sleepStates[min(level, 2)]
	}
}

// sleepPoll is how often Sleep looks whether the engine still holds KV.
const sleepPoll = 2 * time.Millisecond

// holdsKV reports whether a request, or a transfer that has not come, holds blocks.
func (e *Engine) holdsKV() bool {
	return slices.ContainsFunc(e.Ranks, func(r *Rank) bool { return r.Load().UsedTokens > 0 })
}

// WakeUp does what POST /wake_up does; without tags it wakes all parts. Requests that wait are
// scheduled once all memory is back. It reports whether the engine is awake.
func (e *Engine) WakeUp(tags ...string) bool {
	z := &e.Sleeper
	time.Sleep(e.Cfg.WakeTime)
	z.mu.Lock()
	z.asleep = slices.DeleteFunc(z.asleep, func(part string) bool { return len(tags) == 0 || slices.Contains(tags, part) })
	resumes := len(z.asleep) == 0
	if resumes {
		z.state = ""
	}
	z.mu.Unlock()
	if !resumes {
		return false
	}
	z.paused.Store(false)
	for _, r := range e.Ranks {
		r.Mu.Lock()
		r.pump()
		r.Mu.Unlock()
	}
	return true
}

// Sleeping is the answer of GET /is_sleeping.
func (e *Engine) Sleeping() bool {
	e.Sleeper.mu.Lock()
	defer e.Sleeper.mu.Unlock()
	return e.Sleeper.paused.Load() || len(e.Sleeper.asleep) > 0
}
