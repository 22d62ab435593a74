package engine

import (
	"context"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"
)

// sleepMode is the sleep mode of an instance, which only vLLM has. The registry's mu guards writes.
type sleepMode struct {
	ranks      atomic.Pointer[[]bool] // ranks that sleep; nil: none; replaced, never changed
	reported   atomic.Bool            // the engine reports whether it sleeps
	weightless atomic.Bool            // it sleeps without its weights (level 2)
	change     atomic.Uint32          // sleepChange
	changed    atomic.Int64           // when the last change ended, Unix ns
}

// sleepChange is a change of an instance's sleep mode that the proxy makes.
type sleepChange = uint32

const (
	noChange sleepChange = iota
	wakesUp
	fallsAsleep
)

// SleepReport is what an engine reports about its sleep mode.
type SleepReport struct {
	Known      bool   // the engine reports it
	Ranks      []bool // ranks that sleep; nil: none
	Weightless bool   // a rank sleeps without its weights (level 2)
}

// Asleep reports whether a rank of the instance sleeps: its engine answers probes, but would hold
// requests until someone wakes it. Source: vLLM v1/metrics/loggers.py, vllm:engine_sleep_state.
func (i *Instance) Asleep(rank int) bool {
	s := i.sleeping()
	return rank < len(s) && s[rank]
}

// AllAsleep reports whether all ranks of the instance sleep.
func (i *Instance) AllAsleep() bool {
	s := i.sleeping()
	return s != nil && !slices.Contains(s, false)
}

// Waking reports whether the proxy is waking the instance's engine.
func (i *Instance) Waking() bool { return i.sleep.change.Load() == wakesUp }

// Weightless reports whether the instance's engine sleeps without its weights. Only their owner can
// load them again.
func (i *Instance) Weightless() bool { return i.sleep.weightless.Load() }

// ReportsSleep reports whether the instance's engine reports that it sleeps or is awake.
func (i *Instance) ReportsSleep() bool { return i.sleep.reported.Load() }

// sleeping returns which ranks sleep; nil: none. The caller must not change the slice.
func (i *Instance) sleeping() []bool {
	if s := i.sleep.ranks.Load(); s != nil {
		return *s
	}
	return nil
}

// Shown returns the state for people: that of State, and "asleep" or "waking" for a ready instance
// whose ranks all sleep.
func (i *Instance) Shown() string {
	switch s := i.State(); {
	case s != Ready || !i.AllAsleep():
		return s.String()
	case i.Waking():
		return "waking"
	}
	return "asleep"
}

// ReportSleep applies what the engine of i has reported after the time asked. It has no effect while
// the proxy changes the sleep mode, and if the report was not asked for after the end of the change.
func (r *Registry) ReportSleep(i *Instance, report SleepReport, asked time.Time) {
	r.mu.Lock()
	if i.sleep.change.Load() != noChange || asked.UnixNano() <= i.sleep.changed.Load() {
		r.mu.Unlock()
		return
	}
	i.sleep.reported.Store(report.Known)
	i.sleep.weightless.Store(report.Weightless)
	old := r.setAsleep(i, report.Ranks)
	r.mu.Unlock()
	r.noteAsleep(i, old, slog.LevelWarn)
}

// setAsleep sets which ranks of i sleep, and returns those that slept before; nil: none. r.mu is held.
func (r *Registry) setAsleep(i *Instance, ranks []bool) (old []bool) {
	if !slices.Contains(ranks, true) {
		ranks = nil
	}
	if old = i.sleeping(); slices.Equal(old, ranks) {
		return old
	}
	slept := i.AllAsleep()
	if ranks == nil {
		i.sleep.ranks.Store(nil)
	} else {
		i.sleep.ranks.Store(&ranks)
	}
	if i.AllAsleep() != slept {
		i.since.Store(time.Now().UnixMilli())
	}
	r.publish()
	return old
}

// noteAsleep logs which ranks of i fell asleep or woke since old. A sleeping rank has dropped its KV
// blocks, so the index drops them, too.
func (r *Registry) noteAsleep(i *Instance, old []bool, level slog.Level) {
	for rank := range i.ranks() {
		was, is := rank < len(old) && old[rank], i.Asleep(rank)
		switch {
		case is && !was:
			r.log.Log(context.Background(), level, "engine sleeps and gets no requests", "engine", i.Spec.Name, "rank", rank)
			if rank < len(i.KV) {
				r.o.Index.Clear(i.KV[rank])
			}
		case was && !is:
			r.log.Info("engine is awake", "engine", i.Spec.Name, "rank", rank)
		}
	}
}

// BeginWake notes that the caller wakes the engine of i, so that no other caller does. It returns
// false if no rank sleeps, or if the sleep mode is being changed. The caller calls EndWake if it
// returns true.
func (r *Registry) BeginWake(i *Instance) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return i.sleeping() != nil && i.sleep.change.CompareAndSwap(noChange, wakesUp)
}

// EndWake ends BeginWake. If the engine is not awake, its reports show later whether it sleeps.
func (r *Registry) EndWake(i *Instance, awake bool) {
	r.mu.Lock()
	old := i.sleeping()
	if awake {
		r.setAsleep(i, nil)
	}
	i.endChange()
	r.mu.Unlock()
	r.noteAsleep(i, old, slog.LevelInfo)
}

// BeginSleep takes i out of placements, before the caller puts its engine to sleep. It returns false
// if i is not ready, if a rank sleeps, or if the sleep mode is being changed. The caller calls EndSleep
// if it returns true. A placement that began before may still use i.
func (r *Registry) BeginSleep(i *Instance) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i.State() != Ready || i.sleeping() != nil || !i.sleep.change.CompareAndSwap(noChange, fallsAsleep) {
		return false
	}
	r.setAsleep(i, slices.Repeat([]bool{true}, len(i.Load)))
	return true
}

// EndSleep ends BeginSleep. If the engine does not sleep, i gets requests again.
func (r *Registry) EndSleep(i *Instance, asleep bool) {
	r.mu.Lock()
	if !asleep {
		r.setAsleep(i, nil)
	}
	i.endChange()
	r.mu.Unlock()
	if asleep {
		r.noteAsleep(i, nil, slog.LevelInfo)
	}
}

func (i *Instance) endChange() {
	i.sleep.changed.Store(time.Now().UnixNano())
	i.sleep.change.Store(noChange)
}

// forgetSleep makes i count as awake: its process is a new one.
func (r *Registry) forgetSleep(i *Instance) {
	r.mu.Lock()
	i.sleep.weightless.Store(false)
	old := r.setAsleep(i, nil)
	r.mu.Unlock()
	r.noteAsleep(i, old, slog.LevelWarn)
}

// SetWakes says whether requests wake engines. While they do, a model whose engines sleep counts as
// one that can be served.
func (r *Registry) SetWakes(wakes bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.wakes != wakes {
		r.wakes = wakes
		r.publish()
	}
}
