// Package attempt runs one placement of a request: it sends the legs in the order of their
// flow, relays the answer to the client, and has the engines free what a failed attempt left.
// It does not know the exchange; the way back is Replacer.
package attempt

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/prompt"
)

// Run runs one attempt at the placement p. It ends the attempt in any case, also after a
// panic. A nil error means that the client has the whole answer. The HookAnswer is that of the
// leg hook about the error.
func Run(env *Env, p *coordinator.Placement) (answer HookAnswer, err error) {
	a := newAttempt(env, p)
	err = ErrPanicked
	defer func() { a.end(err) }()
	if err = a.run(); err != nil {
		answer = a.askHook(err)
	}
	return answer, err
}

// newAttempt readies an attempt at the placement p.
func newAttempt(env *Env, p *coordinator.Placement) *attempt {
	a := &attempt{
		env: env, p: p,
		conn: env.Connector(p.Decode.Spec.Connector),
		c: connector.Attempt{
			Request: env.Request, ID: p.ID, LegID: env.LegID(),
			Prefill: p.Prefill, Decode: p.Decode, Trust: env.Config.Server.TrustPDFields || env.Route.CallerCoordinates(),
			TRTLLM: *env.trtllm.Load(), Conversation: prompt.Conversation(env.Ask),
		},
	}
	a.began = decodeState{restarts: p.Decode.Restarts(), forced: p.Decode.Breaker.Circuit(time.Now()) == engine.CircuitOpen}
	a.chooseFlow()
	env.Journal.Placed(p, env.Ask.Request.PromptTokens)
	a.joinPair()
	if p.FirstByte > 0 {
		a.deadline = time.Now().Add(p.FirstByte)
	}
	return a
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
	body, err := a.bodyBuffer()
	if err != nil {
		return err
	}
	shaped, err := a.conn.Aggregated(&a.c, body)
	if err != nil {
		return err
	}
	return a.answerLeg(a.env.Context, shaped)
}

// end frees what a failed attempt left on the engines, releases the lease and gives the
// buffers back. When it returns, a clean-up that must come before a retry has been made:
// the engines would otherwise meet the old attempt again.
func (a *attempt) end(err error) {
	if err != nil {
		a.cleanUp(err)
		a.giveUpTurn(err)
	}
	if a.prefill.left != nil { // decode has what prefill's answer would say
		a.prefill.left.Close()
	}
	a.p.Lease.Release()
	a.leavePair()
	a.prefill.answer.Free()
	a.legBody.Free()
	a.prefill = prefillResult{}
}
