package engine

import (
	"context"
	"errors"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// leaveAgain is how often the calls to a silent instance are looked at: that one
// could not be left says nothing of a moment later.
const leaveAgain = 100 * time.Millisecond

// unheardError is a probe that got no answer of any kind.
type unheardError struct{ err error }

func (e unheardError) Error() string { return e.err.Error() }
func (e unheardError) Unwrap() error { return e.err }

// Unresponsive reports that the instance is unhealthy because it answers nothing, while
// others answer: it is stopped or cut off, and what waits for it would wait until
// it is back. One that is slow, or answers with an error, is not silent.
func (i *Instance) Unresponsive() bool { return i.unresponsive.Load() }

// ProbeSoon has the instance probed soon, because a leg on it failed: what is dead is
// then known before the next probe's time. It costs no more than a probe each
// health.suspect_interval.
func (i *Instance) ProbeSoon() { signal(i.probeNow) }

// listen draws from what a probe heard whether the instance is silent. began is
// when the probe was sent.
func (p *prober) listen(h *config.Health, began time.Time, err error) {
	var unheard unheardError
	if !errors.As(err, &unheard) {
		p.mute = 0
		p.r.answered.Store(int64(began.Sub(p.r.born)))
		p.r.silence(p.i, false)
		return
	}
	if p.mute++; p.mute == 1 {
		p.since = began
	}
	// That nobody at all has answered since says that it is us who are cut off.
	if p.mute >= h.UnhealthyAfter && time.Duration(p.r.answered.Load()) > p.since.Sub(p.r.born) {
		p.r.silence(p.i, p.i.State() == Unhealthy)
	}
}

// errLate is a probe whose time-out fired later than it should have: it was this
// process that did not run, which says nothing of the engine.
var errLate = errors.New("probe engine: this process did not run in time")

// late reports whether err came of a time-out that fired too late.
func late(limit, took time.Duration, err error) bool {
	return timedOut(err) && took > limit+limit/4
}

// pause is how long the prober waits, after a probe that was sent at began, for the
// next one.
func (p *prober) pause(h *config.Health, began time.Time) time.Duration {
	wait := time.Duration(h.Interval) - time.Since(began)
	if again := time.Duration(h.SuspectInterval); again > 0 && p.mute > 0 && p.mute < h.UnhealthyAfter {
		wait = min(wait, again)
	}
	return max(0, wait)
}

// silence notes whether i is silent.
func (r *Registry) silence(i *Instance, silent bool) {
	if i.unresponsive.Swap(silent) == silent {
		return
	}
	signal(r.changed)
	if silent {
		r.log.Warn("engine is silent: what waits for it is tried elsewhere", "engine", i.Spec.Name)
		signal(i.fell)
	}
}

// leave has the calls left that wait for i, or elsewhere for its KV, whenever it is
// silent, until ctx ends.
func (r *Registry) leave(ctx context.Context, i *Instance) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-i.fell:
		}
		for i.Unresponsive() {
			i.Client.EvictIdle(i, time.Duration(r.health.Load().Timeout))
			for _, other := range r.Snapshot().Instances { // where KV of its is waited for
				if other != i {
					other.Client.EvictIdle(i, 0)
				}
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(leaveAgain):
			}
		}
	}
}
