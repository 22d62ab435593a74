package exchange

import (
	"context"
	"errors"
	"time"

	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// probeRule waits for the first probes of engines if there is no placement while engines that may
// serve the model have not been looked at. Without the wait, a request at the start would get an
// error, or another model, although its engines are ready.
type probeRule struct {
	wait
	before  *engine.Snapshot // from before the question
	changed <-chan struct{}  // from before the question, so that no change is missed; nil: there was no question in the wait
	late    error            // the answer that began the wait
}

// maxAwaited bounds the wait for probes, also while engines come again and again.
const maxAwaited = 2 * engine.FirstList

func (r *probeRule) begin(p *placing) error {
	if r.ctx != nil {
		if r.changed != nil {
			if err := p.x.run.Waiting.Pause(r.ctx, r.changed, maxAwaited); err != nil {
				if !errors.Is(err, r.late) {
					_ = p.x.waitedInVain(err) // returns err
				}
				r.stop()
				return err
			}
		}
		r.changed = p.x.run.Registry.Changed()
	}
	r.before = p.x.run.Registry.Snapshot()
	return nil
}

func (r *probeRule) judge(p *placing, a *answer) (again bool) {
	// A policy may have rejected the request because a phase has no engine yet.
	if a.err == nil || !lacksEngine(a.err) && !errors.Is(a.err, coordinator.ErrRejected) || !r.before.Awaits(p.x.req.Model) {
		if r.ctx != nil {
			r.stop()
		}
		return false
	}
	if r.ctx == nil {
		r.late = a.err
		r.wait = p.x.beginWait(telemetry.StageWaitsEngine, maxAwaited, r.late)
	}
	return true
}

func (r *probeRule) stop() {
	r.end()
	r.before, r.changed, r.late = nil, nil, nil
}

// engineRule restricts a placement to engines whose process has not ended. While no engine can take
// a request for a known model, it waits in the line of the model for at most
// limits.no_engine_timeout, and not beyond the request's deadline.
type engineRule struct {
	wait
	model   string // the known model, if the request may wait; "": it may not
	seat    *admission.Seat
	changed <-chan struct{} // from before the question, so that no change is missed
	began   time.Time       // when the request began to wait for engines that sleep; zero: it does not
}

func (r *engineRule) begin(p *placing) (err error) {
	if r.ctx == nil {
		if r.model = ""; p.model.waits {
			r.model = p.x.knownModel()
		}
		if r.model == "" || !p.x.run.Waiting.Occupied(r.model) {
			return nil
		}
		r.queue(p)
	}
	if r.seat == nil {
		r.seat = p.x.run.Waiting.Join(r.model)
		err = r.seat.Turn(r.ctx)
	} else {
		err = r.seat.Pause(r.ctx, r.changed)
	}
	if err != nil {
		r.stop(p)
		return p.x.waitedInVain(err)
	}
	r.changed = p.x.run.Registry.Changed()
	return nil
}

func (r *engineRule) judge(p *placing, a *answer) (again bool) {
	if a.err == nil && !p.model.moves && p.hasEnded(a.placement) {
		a.err = &coordinator.NoTargetError{Model: p.ask.Model}
	}
	if r.model == "" || !lacksEngine(a.err) {
		if p.waited = r.ctx != nil; p.waited {
			r.stop(p)
		}
		return false
	}
	if r.ctx == nil {
		r.queue(p)
	}
	if r.began.IsZero() && p.x.env.Config.Sleep.Wake && p.x.asleep() > 0 {
		r.began = time.Now()
	}
	return true
}

// queue begins the wait in the line of the model.
func (r *engineRule) queue(p *placing) {
	r.wait = p.x.beginWait(telemetry.StageWaitsEngine, time.Duration(p.x.env.Config.Limits.NoEngineTimeout), admission.ErrNoEngineTimeout)
}

func (r *engineRule) stop(p *placing) {
	if r.seat != nil {
		r.seat.Leave()
	}
	if !r.began.IsZero() {
		p.x.journal.Note("the engines of the model slept: the request waited for " + time.Since(r.began).Round(time.Millisecond).String())
	}
	r.end()
	r.seat, r.changed, r.began = nil, nil, time.Time{}
}

// The plan policy is asked again after holdFirst, then after twice as long each time up to
// holdLast, and whenever the engines change.
const (
	holdFirst = 25 * time.Millisecond
	holdLast  = time.Second
)

// holdRule waits while the plan policy holds the request: at most as long as the policy allows, as
// limits.queue_timeout, and until the request's deadline. A retry of the request may wait again. The
// request keeps its place among the running requests.
type holdRule struct {
	wait
	began    time.Time
	interval time.Duration // until the policy is asked again
}

func (r *holdRule) begin(p *placing) error {
	if r.ctx == nil {
		return nil
	}
	if err := p.x.run.Waiting.Pause(r.ctx, p.x.run.Registry.Changed(), r.interval); err != nil {
		_ = p.x.waitedInVain(err) // returns err
		r.stop(p)
		return err
	}
	r.interval = min(2*r.interval, holdLast)
	return nil
}

func (r *holdRule) judge(p *placing, a *answer) (again bool) {
	var held *coordinator.HeldError
	if a.err == nil || !errors.As(a.err, &held) {
		if r.ctx != nil {
			r.stop(p)
		}
		return false
	}
	if r.ctx == nil {
		limit := time.Duration(p.x.env.Config.Limits.QueueTimeout)
		if held.Limit > 0 {
			limit = min(limit, held.Limit)
		}
		r.wait = p.x.beginWait(telemetry.StageWaitsPolicy, limit, admission.ErrHeld)
		r.began, r.interval = time.Now(), holdFirst
	}
	return true
}

func (r *holdRule) stop(p *placing) {
	p.x.journal.Note("the plan policy held the request for " + time.Since(r.began).Round(time.Millisecond).String())
	r.end()
}

// wait is one wait of a request for a placement. The zero value is none.
type wait struct {
	ctx  context.Context // ends with the request's context, at the request's deadline, and after the limit of the wait
	over func()
}

// beginWait begins a wait. Its context ends after limit with the cause late.
func (x *exchange) beginWait(stage telemetry.Stage, limit time.Duration, late error) wait {
	until, stop := x.untilDeadline(x.env.Context)
	ctx, cancel := context.WithTimeoutCause(until, limit, late)
	x.journal.Stage(stage)
	return wait{ctx, func() {
		x.journal.Stage(telemetry.StageRuns)
		cancel()
		stop()
	}}
}

// end ends the wait.
func (w *wait) end() {
	w.over()
	*w = wait{}
}

// endWaits ends the waits that a panic has left.
func (p *placing) endWaits() {
	if p.probe.ctx != nil {
		p.probe.stop()
	}
	if p.engine.ctx != nil {
		p.engine.stop(p)
	}
	if p.hold.ctx != nil {
		p.hold.stop(p)
	}
}

// waitedInVain records that a wait ended with err, and returns err. A client that left is not
// counted as refused.
func (x *exchange) waitedInVain(err error) error {
	if x.env.Context.Err() == nil {
		x.journal.Shed(admission.Reason(err))
	}
	return err
}
