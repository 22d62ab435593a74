package engine

import (
	"context"
	"errors"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// evictEvery is how often the calls to an unresponsive instance are checked again: a
// call that could not be evicted may be evictable a moment later.
const evictEvery = 100 * time.Millisecond

// noAnswerError is the error of a probe without any answer.
type noAnswerError struct{ err error }

func (e noAnswerError) Error() string { return e.err.Error() }
func (e noAnswerError) Unwrap() error { return e.err }

// Unresponsive reports whether the instance is unhealthy because it answers nothing
// while other instances answer: it is stopped or cut off, and calls to it would wait
// until it is back. An instance that is slow, or answers with an error, is not
// unresponsive.
func (i *Instance) Unresponsive() bool { return i.unresponsive.Load() }

// ProbeSoon requests an early probe of the instance after a leg on it failed. Thus a dead
// engine is detected before the next regular probe. There is at most one such probe per
// health.suspect_interval.
func (i *Instance) ProbeSoon() { signal(i.probeNow) }

// noteAnswer updates, from the result of a probe, whether the instance is unresponsive.
// began is when the probe was sent, and othersAnswered is the value of lastAnswered then.
//
// The instance is unresponsive only if another instance answered a probe that lies between two
// unanswered probes of this instance. Otherwise this process itself may have been cut off: the
// engines' probes begin and end at different times, so one of them may have been answered just
// before the cut, or just after its end.
func (p *prober) noteAnswer(h *config.Health, began, othersAnswered time.Time, err error) {
	var noAnswer noAnswerError
	if !errors.As(err, &noAnswer) {
		p.unanswered = 0
		p.r.answered.Store(int64(began.Sub(p.r.born)))
		p.r.setUnresponsive(p.i, false)
		return
	}
	if p.unanswered++; p.unanswered == 1 {
		p.unansweredSince = time.Now()
	}
	if p.unanswered >= h.UnhealthyAfter && othersAnswered.After(p.unansweredSince) {
		p.r.setUnresponsive(p.i, p.i.probed() == Unhealthy)
	}
}

// lastAnswered returns when the latest probe that any instance has answered was sent.
func (r *Registry) lastAnswered() time.Time {
	return r.born.Add(time.Duration(r.answered.Load()))
}

// errLate is the error of a probe whose time-out fired late: this process did not get processor
// time, so the engine may be healthy.
var errLate = errors.New("probe engine: this process did not run in time")

// late reports whether err comes from a time-out that fired late.
func late(limit, took time.Duration, err error) bool {
	return timedOut(err) && took > limit+limit/4
}

// pause returns how long the prober waits for the next probe. began is when the last
// one was sent.
func (p *prober) pause(h *config.Health, began time.Time) time.Duration {
	wait := time.Duration(h.Interval) - time.Since(began)
	if again := time.Duration(h.SuspectInterval); again > 0 && p.unanswered > 0 && p.unanswered < h.UnhealthyAfter {
		wait = min(wait, again)
	}
	return max(0, wait)
}

// setUnresponsive sets whether i is unresponsive.
func (r *Registry) setUnresponsive(i *Instance, unresponsive bool) {
	if i.unresponsive.Swap(unresponsive) == unresponsive {
		return
	}
	signal(r.changed)
	if unresponsive {
		r.log.Warn("engine is unresponsive: calls that wait for it are retried elsewhere", "engine", i.Spec.Name)
		signal(i.evictNow)
	}
}

// evictCalls acts on each signal that i may take no work, until ctx ends: it withdraws the
// calls whose result no engine can use any more. While i is unresponsive, it evicts the calls
// that wait for i, or elsewhere for KV of i. While the streams of i move, it evicts a few at a time.
func (r *Registry) evictCalls(ctx context.Context, i *Instance) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-i.evictNow:
		}
		r.withdrawCalls()
		for i.Unresponsive() || i.moveAt.Load() != 0 {
			switch {
			case i.Unresponsive():
				i.Client.EvictIdle(i, time.Duration(r.health.Load().Timeout))
				for _, other := range r.Snapshot().Instances { // calls to other instances may wait for i's KV
					if other != i {
						other.Client.EvictIdle(i, 0)
					}
				}
			case r.moves(i):
				i.Client.EvictIdle(&Moving{i, movesAtOnce}, 0)
			}
			select {
			case <-ctx.Done():
				return
			case <-i.evictNow: // i has ended meanwhile, or its circuit has opened
				r.withdrawCalls()
			case <-time.After(evictEvery):
			}
		}
	}
}

// withdrawCalls withdraws the calls to all instances whose result no engine can use any more.
func (r *Registry) withdrawCalls() {
	for _, i := range r.Snapshot().Instances {
		i.Client.Withdraw()
	}
}
