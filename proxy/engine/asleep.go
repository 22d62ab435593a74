package engine

import "slices"

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

// sleeping returns which ranks sleep; nil: none. The caller must not change the slice.
func (i *Instance) sleeping() []bool {
	if s := i.asleep.Load(); s != nil {
		return *s
	}
	return nil
}

// Shown returns the state for people: that of State, and "asleep" for a ready instance whose ranks
// all sleep.
func (i *Instance) Shown() string {
	if s := i.State(); s != Ready || !i.AllAsleep() {
		return s.String()
	}
	return "asleep"
}

// SetAsleep sets which ranks of i sleep; nil: none. A sleeping rank gets no request. It has dropped
// its KV blocks, so the index drops them, too.
func (r *Registry) SetAsleep(i *Instance, ranks []bool) {
	if !slices.Contains(ranks, true) {
		ranks = nil
	}
	r.mu.Lock()
	old := i.sleeping()
	if slices.Equal(old, ranks) {
		r.mu.Unlock()
		return
	}
	if ranks == nil {
		i.asleep.Store(nil)
	} else {
		i.asleep.Store(&ranks)
	}
	r.publish()
	r.mu.Unlock()
	for rank := range i.ranks() {
		was, is := rank < len(old) && old[rank], i.Asleep(rank)
		switch {
		case is && !was:
			r.log.Warn("engine sleeps and gets no requests", "engine", i.Spec.Name, "rank", rank)
			if rank < len(i.KV) {
				r.o.Index.Clear(i.KV[rank])
			}
		case was && !is:
			r.log.Info("engine is awake", "engine", i.Spec.Name, "rank", rank)
		}
	}
}
