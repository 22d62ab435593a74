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

// meter sets the instruments of the request's model.
func (x *exchange) meter() {
	if model := x.knownModel(); model != "" {
		x.journal.Model(x.run.Metrics.Model(model))
	}
}

// knownModel returns the model that the client named, or the only one if it named none. It
// returns "" for a model that no engine has served: the name is then only a text of the
// client.
func (x *exchange) knownModel() string {
	s := x.run.Registry.Snapshot()
	if x.req.Model != "" {
		if s.Knows(x.req.Model) {
			return x.req.Model
		}
		return ""
	}
	if p, _ := s.Only(); p != nil {
		return p.Model
	}
	return only(s)
}

// only returns the model if the registry has known exactly one, else "".
func only(s *engine.Snapshot) string {
	if known := s.Known(); len(known) == 1 {
		return known[0]
	}
	return ""
}

// placeOrWait requests the next placement. While no engine can take a request for a known model,
// placeOrWait waits for at most limits.no_engine_timeout, and not beyond the request's deadline. An
// engine whose process has ended can take none.
func (x *exchange) placeOrWait() (*coordinator.Placement, error) {
	limit, model := time.Duration(x.env.Config.Limits.NoEngineTimeout), ""
	if limit > 0 {
		model = x.knownModel()
	}
	if model == "" {
		return x.place()
	}
	if !x.run.Waiting.Occupied(model) {
		p, err := x.placeRunning()
		if !lacksEngine(err) {
			return p, err
		}
	}
	return x.waitForEngine(model, limit)
}

// placeRunning is place without engines whose process has ended.
func (x *exchange) placeRunning() (*coordinator.Placement, error) {
	p, err := x.place()
	if err == nil && x.hasEnded(p) {
		p.Lease.Release()
		return nil, &coordinator.NoTargetError{Model: x.ask.Model}
	}
	return p, err
}

// hasEnded reports whether the process of an engine of p has ended, and the request may wait for
// its next one.
func (x *exchange) hasEnded(p *coordinator.Placement) bool {
	return x.env.Config.Limits.NoEngineTimeout > 0 &&
		(!p.Prefill.IsZero() && p.Prefill.Ended() || p.Decode.Ended())
}

// lacksEngine reports whether a later try may succeed because engines have come.
func lacksEngine(err error) bool {
	return errors.Is(err, coordinator.ErrNoTarget) || errors.Is(err, coordinator.ErrUnknownModel)
}

// waitForEngine waits in the model's line until a placement succeeds.
func (x *exchange) waitForEngine(model string, limit time.Duration) (*coordinator.Placement, error) {
	ctx, end := x.beginWait(telemetry.StageWaitsEngine, limit, admission.ErrNoEngineTimeout)
	defer end()
	seat := x.run.Waiting.Enter(model)
	defer seat.Leave()
	err := seat.Turn(ctx)
	for err == nil {
		changed := x.run.Registry.Changed() // before the placement, so that no change is missed
		var p *coordinator.Placement
		if p, err = x.placeRunning(); !lacksEngine(err) {
			x.waited = true
			return p, err
		}
		err = seat.Pause(ctx, changed)
	}
	return nil, x.waitedInVain(err)
}

// beginWait begins a wait of the request for a placement. The context ends with the request's
// context, at the request's deadline, and after limit with the cause late. The caller calls end.
func (x *exchange) beginWait(stage telemetry.Stage, limit time.Duration, late error) (ctx context.Context, end func()) {
	until, stop := x.untilDeadline(x.env.Context)
	ctx, cancel := context.WithTimeoutCause(until, limit, late)
	x.journal.Stage(stage)
	return ctx, func() {
		x.journal.Stage(telemetry.StageRuns)
		cancel()
		stop()
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
