// Package sleepmode wakes vLLM engines that sleep when requests need them, and puts the engines of a
// model to sleep that no request uses. It makes the calls; the registry holds the state, which its
// placements follow.
//
// The decisions behind this package are in docs/design/engines.md.
package sleepmode

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/inflight"
)

const (
	// lookEvery is how often Run looks for models that no request uses.
	lookEvery = 250 * time.Millisecond
	// After a failed call, the next one on the same engine waits for firstPause, and after each further
	// failure twice as long, up to longestPause. Each first request of a line asks every second.
	firstPause   = time.Second
	longestPause = time.Minute
)

// Options is what a Manager needs. All fields are needed.
type Options struct {
	Registry *engine.Registry
	// Leads reports whether this process may put engines to sleep. Of several processes with the same
	// engines, one leads; the others do not see all requests.
	Leads func() bool
	// Woke and Slept receive the result of each call, and its duration. They must not block.
	Woke, Slept func(engine, result string, took time.Duration)
	Log         *slog.Logger
}

// Manager wakes engines and puts them to sleep. Safe for concurrent use.
type Manager struct {
	o          Options
	cfg        atomic.Pointer[config.Sleep]
	configured chan struct{}  // wakes Run after a new configuration
	calls      inflight.Group // calls in flight, each for another engine
	ctx        context.Context
	cancel     context.CancelFunc

	mu      sync.Mutex
	engines map[*engine.Instance]*state // guarded by mu
}

// state is what the manager knows about one engine. Manager.mu guards it.
type state struct {
	used     time.Time // the engine was in use, or something else kept it awake
	failures int       // failed calls in a row
	rest     time.Time // no call before this time
	ours     bool      // the manager has put it to sleep and not woken it since
}

// New returns a manager. It starts nothing.
func New(cfg config.Sleep, o Options) *Manager {
	m := &Manager{o: o, configured: make(chan struct{}, 1), engines: make(map[*engine.Instance]*state)}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.Configure(cfg)
	return m
}

// Configure replaces the configuration for the next calls.
func (m *Manager) Configure(cfg config.Sleep) {
	m.cfg.Store(&cfg)
	select {
	case m.configured <- struct{}{}:
	default:
	}
}

// Run puts engines to sleep until ctx ends. When it returns, no call is in flight. An engine goes on to
// wake up after a call that has ended early.
func (m *Manager) Run(ctx context.Context) {
	defer m.calls.Wait()
	defer m.cancel()
	tick := time.NewTicker(time.Hour)
	defer tick.Stop()
	for ctx.Err() == nil {
		if tick.Stop(); m.cfg.Load().After > 0 {
			tick.Reset(lookEvery)
		}
		for more := true; more; {
			select {
			case <-ctx.Done():
				more = false
			case <-m.configured:
				more = false
			case <-tick.C:
				m.look(time.Now())
			}
		}
	}
}

// May implements coordinator.Waker.
func (m *Manager) May(i *engine.Instance) bool {
	if !m.cfg.Load().Wake || i.Weightless() {
		return false
	}
	if i.Waking() {
		return true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return !time.Now().Before(m.state(i).rest)
}

// Wake implements coordinator.Waker.
func (m *Manager) Wake(i *engine.Instance) {
	if m.May(i) && m.o.Registry.BeginWake(i) {
		m.calls.Go(func() { m.wake(i) })
	}
}

// state returns the state of an engine; m.mu is held.
func (m *Manager) state(i *engine.Instance) *state {
	s := m.engines[i]
	if s == nil {
		s = &state{used: time.Now()}
		m.engines[i] = s
	}
	return s
}

// wake wakes one engine, between BeginWake and EndWake.
func (m *Manager) wake(i *engine.Instance) {
	began := time.Now()
	ctx, cancel := m.limited(i)
	defer cancel()
	m.o.Log.Info("waking an engine: a request needs it", "engine", i.Spec.Name)
	result, err := wakeUp(ctx, i)
	m.o.Registry.EndWake(i, result == OK)
	m.ended("wake", i, result, err, time.Since(began), m.o.Woke)
}

// rest puts one engine to sleep, between BeginSleep and EndSleep. After a failure the engine is woken,
// because it may have stopped its scheduler: source vLLM v1/engine/core.py, sleep.
func (m *Manager) rest(i *engine.Instance) {
	began := time.Now()
	ctx, cancel := m.limited(i)
	defer cancel()
	result, err := Used, error(nil)
	if i.Idle() { // no placement has used an earlier snapshot
		m.o.Log.Info("putting an engine to sleep: no request uses its model", "engine", i.Spec.Name)
		result, err = fallAsleep(ctx, i)
	}
	if result != OK && result != Used && result != Unsupported {
		again, cancel := m.limited(i)
		if _, err := wakeUp(again, i); err != nil {
			m.o.Log.Warn("engine may hold requests: it did not fall asleep, and could not be woken", "engine", i.Spec.Name, "error", err)
		}
		cancel()
	}
	m.o.Registry.EndSleep(i, result == OK)
	m.ended("sleep", i, result, err, time.Since(began), m.o.Slept)
}

// limited returns the context of a call: it ends after sleep.timeout, when the engine leaves, and when
// Run ends.
func (m *Manager) limited(i *engine.Instance) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(m.ctx, time.Duration(m.cfg.Load().Timeout))
	left := make(chan struct{})
	go func() { // ends with the call
		select {
		case <-i.Leaving():
			cancel()
		case <-left:
		}
	}()
	return ctx, func() { close(left); cancel() }
}

// ended notes the end of a call.
func (m *Manager) ended(call string, i *engine.Instance, result string, err error, took time.Duration, report func(engine, result string, took time.Duration)) {
	m.mu.Lock()
	s := m.state(i)
	s.used, s.ours = time.Now(), call == "sleep" && result == OK
	switch result {
	case OK, Used:
		s.failures, s.rest = 0, time.Time{}
	default:
		s.rest = time.Now().Add(min(longestPause, firstPause<<min(s.failures, 10)))
		s.failures++
	}
	m.mu.Unlock()
	if report(i.Spec.Name, result, took); result != OK && result != Used {
		m.o.Log.Warn("the engine's sleep mode did not change", "engine", i.Spec.Name, "call", call, "result", result, "error", err)
	}
}
