package exchange

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// saturable returns the model whose engines must not be saturated when the request gets its
// place; "" for none: the load of engines holds no request back, no engine has served the model,
// or the request goes to an engine's own route.
func (x *exchange) saturable() string {
	if x.env.Config.Limits.SaturationQueueDepth == 0 || x.req.API == openai.EngineRoute {
		return ""
	}
	return x.knownModel()
}

// enter waits for a place among the running requests, while the engines of claim.Model are not
// saturated. The explanation of the request then names the saturation.
func (x *exchange) enter(ctx context.Context, claim admission.Claim) (err error) {
	if claim.Model == "" {
		x.admitted, err = x.run.Queue.Enter(ctx, claim, x.env.Config.Limits)
		return err
	}
	var since time.Time
	claim.Held = func() {
		since = time.Now()
		x.journal.Stage(telemetry.StageSaturated)
	}
	x.admitted, err = x.run.Queue.Enter(ctx, claim, x.env.Config.Limits)
	if !since.IsZero() {
		x.journal.Note("the engines of the model were saturated: the request waited for " + time.Since(since).Round(time.Millisecond).String())
	}
	var late *admission.SaturatedError
	if errors.As(err, &late) {
		x.client.AnswerHeader().Set("Retry-After", strconv.FormatInt(late.RetrySeconds(), 10))
		x.journal.Note("the engines of the model were saturated: their work would have delayed the request by " + late.Delay.Round(time.Millisecond).String())
	}
	return err
}
