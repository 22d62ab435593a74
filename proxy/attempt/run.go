// Package attempt runs one placement of a request. It sends the legs in the order of their
// flow, relays the answer to the client, and makes the engines free the KV blocks of a failed
// attempt. The package does not import the exchange: an attempt calls it through Replacer.
// Each file refers only to files below it, from the top: run and gateway; prefill_first,
// concurrent and encode; prefill and decode; relay and send; the files for one task each;
// attempt; env; leg and failure.
//
// The decisions behind this package are in docs/design/attempt.md.
package attempt

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/prompt"
)

// Run runs one attempt at the placement p. The attempt has ended when Run returns, even after a
// panic. A nil error means that the client has the whole answer. The HookAnswer is the decision
// of the leg hook about the error.
func Run(env *Env, p *coordinator.Placement) (answer HookAnswer, err error) {
	a := newAttempt(env, p)
	err = ErrPanicked
	defer func() { a.end(err) }()
	if err = a.run(); err != nil {
		answer = a.askHook(err)
	}
	return answer, err
}

// newAttempt returns an attempt at the placement p.
func newAttempt(env *Env, p *coordinator.Placement) *attempt {
	a := bare(env, p)
	a.c.TRTLLM = *env.trtllm.Load()
	a.began = decodeState{restarts: p.Decode.Restarts(), forced: p.Decode.Breaker.Circuit(time.Now()) == engine.CircuitOpen}
	a.chooseFlow()
	env.Journal.Placed(p, env.Ask.Request.PromptTokens)
	a.joinPair()
	if p.FirstByte > 0 {
		a.deadline = time.Now().Add(p.FirstByte)
	}
	return a
}

// bare returns an attempt at the placement p of which nothing is recorded yet.
func bare(env *Env, p *coordinator.Placement) *attempt {
	return &attempt{
		env: env, p: p,
		conn: env.Connector(p.Decode.Spec.Connector),
		c: connector.Attempt{
			Request: env.Request, ID: p.ID, LegID: env.LegID(),
			Prefill: p.Prefill, Decode: p.Decode, Trust: env.Config.Server.TrustPDFields || env.Route.CallerCoordinates(),
			Conversation: prompt.Conversation(env.Ask),
		},
	}
}

// run sends the legs in the order of the flow.
func (a *attempt) run() error {
	if err := a.encode(); err != nil {
		return err
	}
	switch a.p.Flow {
	case abi.FlowPrefillFirst:
		return a.prefillFirst()
	case abi.FlowConcurrent, abi.FlowDecodeFirst:
		return a.concurrent()
	default:
		return a.aggregated()
	}
}

// chooseFlow chooses the order of the legs if the connector has several.
func (a *attempt) chooseFlow() {
	if o, ok := a.conn.(connector.Ordered); ok && !a.p.Prefill.IsZero() {
		var fallback string
		if a.p.Flow, fallback = o.Order(&a.c, a.env.Config.Retry.ScheduleStyle); fallback != "" {
			a.p.Fallbacks = append(a.p.Fallbacks, coordinator.Fallback{What: "schedule_style", Reason: fallback})
		}
	}
	a.c.Flow = a.p.Flow
}

// aggregated sends one leg to an engine that serves both phases.
func (a *attempt) aggregated() error {
	var shaped connector.Leg
	if err := a.shapeAggregated(&shaped); err != nil {
		return err
	}
	return a.answerLeg(a.env.Context, &shaped)
}

// end starts the clean-up of a failed attempt, releases the lease and frees the buffers. If a
// retry must not overlap with the old legs on the engines, end returns after the engines have
// answered the clean-up.
func (a *attempt) end(err error) {
	if err != nil {
		a.cleanUp(err)
		a.giveUpTurn()
	}
	if a.prefill.left != nil { // nobody needs the late answer of prefill any more
		a.prefill.left.Close()
	}
	a.p.Lease.Release()
	a.leavePair()
	a.prefill.answer.Free()
	a.legBody.Free()
	a.prefill = prefillResult{}
}
