// Package attempt runs one placement of a request. It sends the legs in the order of their
// flow, relays the answer to the client, and makes the engines free the KV blocks of a failed
// attempt. The package calls nothing of the exchange: Run returns an Outcome, which also says if the
// attempt needs another engine to go on.
// Each file refers only to files below it, from the top: run and gateway; prefill_first,
// concurrent and encode; prefill and decode; relay and send; the files for one task each;
// attempt; env; leg and failure.
//
// The decisions behind this package are in docs/design/attempt.md.
package attempt

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/prompt"
)

// Outcome is the result of Run.
type Outcome struct {
	Err  error      // nil: the client has the whole answer, or Needs is NeedsPick or NeedsServing
	Hook HookAnswer // the decision of the leg hook about Err
	// Needs is what the attempt needs to go on; NeedsNothing: it has ended. Otherwise the attempt
	// waits, and the next call of Run must follow: the placement has the prefill target and the
	// disagg id of Placement, or is nil if there is none.
	Needs     Need
	Placement *coordinator.Placement
	Engines   []*engine.Instance // for NeedsServing
}

// Need is what an attempt needs to go on.
type Need uint8

// The needs of an attempt, and what the attempt does without another placement.
const (
	NeedsNothing Need = iota
	NeedsPick         // prefill has answered, and the picker of a sidecar may choose decode. Without: decode stays on its engine
	NeedsDecode       // a decode leg failed with Err, and prefill still has the KV. Without: the attempt ends with Err
	NeedsServing      // a gateway has sent the request to one of Engines. Without: no known engine serves it
)

// Run runs one attempt at the placement p, or goes on with the attempt that waits for p. An attempt
// that does not wait has ended when Run returns, even after a panic.
func Run(env *Env, p *coordinator.Placement) (o Outcome) {
	a := env.waiting
	goesOn := a != nil
	if env.waiting = nil; !goesOn {
		a = newAttempt(env, p)
	}
	o.Err = ErrPanicked
	defer func() { a.leave(&o) }()
	if goesOn {
		o.Err = a.goOn(p)
	} else {
		o.Err = a.run()
	}
	o.Needs, o.Placement = a.needs, a.p
	if a.needs == NeedsServing {
		o.Engines = a.observation.head.Engines
	}
	if o.Err != nil && env.Gateway == nil {
		o.Hook = a.askHook(o.Err)
	}
	return o
}

// leave lets the attempt wait for another placement, or ends it.
func (a *attempt) leave(o *Outcome) {
	if o.Needs == NeedsNothing {
		a.end(o.Err)
		return
	}
	a.env.waiting, a.failed = a, o.Err
}

// newAttempt returns an attempt at the placement p of which nothing is recorded yet.
func newAttempt(env *Env, p *coordinator.Placement) *attempt {
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

// begin records the attempt.
func (a *attempt) begin() {
	p := a.p
	if c, ok := a.conn.(connector.Configurer); ok {
		c.Configure(&a.c)
	}
	a.began = decodeState{restarts: p.Decode.Restarts(), forced: p.Decode.Breaker.Circuit(time.Now()) == circuit.Open}
	a.chooseFlow()
	a.env.Journal.Placed(p, a.env.Ask.Request.PromptTokens)
	a.joinPair()
	if p.FirstByte > 0 {
		a.deadline = time.Now().Add(p.FirstByte)
	}
}

// run sends the legs in the order of the flow.
func (a *attempt) run() error {
	if a.env.Gateway != nil {
		return a.observe()
	}
	a.begin()
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

// goOn continues an attempt that has waited for p; nil: there is no other placement.
func (a *attempt) goOn(p *coordinator.Placement) error {
	needs, failed := a.needs, a.failed
	a.needs, a.failed = NeedsNothing, nil
	switch {
	case needs == NeedsServing:
		return a.observation.goOn(p)
	case p != nil:
		a.move(p)
	case needs == NeedsDecode:
		return failed
	}
	return a.decodeAfterPrefill()
}

// chooseFlow chooses the order of the legs if the connector has several.
func (a *attempt) chooseFlow() {
	if o, ok := a.conn.(connector.Ordered); ok && !a.p.Prefill.IsZero() {
		var fallback string
		if a.p.Flow, fallback = o.Order(&a.c, a.env.Config.TRTLLM.ScheduleStyle); fallback != "" {
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
	if err != nil && a.env.Gateway == nil { // what a gateway has sent is not this proxy's to free
		a.cleanUp(err)
		a.giveUpTurn()
	}
	if a.owed.late != nil { // nobody needs the late answer of prefill any more
		a.owed.late.Close()
	}
	a.p.Lease.Release()
	a.leavePair()
	a.prefill.answer.Free()
	a.owed.legBody.Free()
	a.prefill = prefillAnswer{}
}
