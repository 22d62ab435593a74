package exchange

import (
	"errors"
	"time"

	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// The plan policy is asked again after holdFirst, then after twice as long each time up to
// holdLast, and whenever the engines change.
const (
	holdFirst = 25 * time.Millisecond
	holdLast  = time.Second
)

// placeOrHold requests the next placement as placeAny does. While the plan policy holds the
// request, placeOrHold waits and asks again. The wait ends after the policy's limit, after
// limits.queue_timeout, or at the request's deadline. A retry of the request may wait again. The
// request keeps its place among the running requests.
func (x *exchange) placeOrHold() (*coordinator.Placement, error) {
	p, err := x.placeAny()
	var held *coordinator.HeldError
	if !errors.As(err, &held) {
		return p, err
	}
	limit := time.Duration(x.env.Config.Limits.QueueTimeout)
	if held.Limit > 0 {
		limit = min(limit, held.Limit)
	}
	ctx, end := x.beginWait(telemetry.StageWaitsPolicy, limit, admission.ErrHeld)
	defer end()
	began := time.Now()
	defer func() {
		x.journal.Note("the plan policy held the request for " + time.Since(began).Round(time.Millisecond).String())
	}()
	for interval := holdFirst; ; interval = min(2*interval, holdLast) {
		if err = x.run.Waiting.Pause(ctx, x.run.Registry.Changed(), interval); err != nil {
			return nil, x.waitedInVain(err)
		}
		if p, err = x.placeAny(); !errors.As(err, &held) {
			return p, err
		}
	}
}
