package attempt

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
)

// prefillFirst sends the prefill leg, waits for its answer, and sends the decode leg, which
// contains parameters of that answer.
func (a *attempt) prefillFirst() error {
	a.pullTurn()
	shaped, body, err := a.shapePrefill()
	if err != nil {
		return err
	}
	if err = a.prefillAlone(shaped, body); err != nil {
		return err
	}
	a.setOrphanCleanup()
	a.prefill.handed = time.Now()
	a.env.Journal.PrefillDone()
	if a.prefill.handoff.Done {
		return a.replyHandoff()
	}
	if a.decodeEnded() { // any other decode is worth a try: prefill holds the blocks already
		return a.noDecode()
	}
	if a.env.Route.Restricted && a.env.Route.DefersDecode() {
		a.needs = NeedsPick
		return nil
	}
	return a.decodeAfterPrefill()
}

// decodeAfterPrefill sends the decode leg for the KV that prefill has computed. If the leg fails
// before it can have reached its engine, or if its engine has no room, the attempt needs another
// decode engine.
func (a *attempt) decodeAfterPrefill() error {
	var shaped connector.Leg
	if err := a.shapeDecode(&shaped, &a.prefill.handoff); err != nil {
		return err
	}
	err := a.answerLeg(a.env.Context, &shaped)
	final := err == nil || downstream.OwnFault(err) || maybeSent(err) && !overloaded(err) || connector.PinsDecode(a.conn) || a.leaseOver()
	if !final && !a.wantsNewAttempt(err) {
		a.needs = NeedsDecode
	}
	return err
}

// prefillAlone runs the prefill leg and frees its body.
func (a *attempt) prefillAlone(shaped connector.Leg, body *buffer.Buffer) error {
	defer body.Free()
	var r prefillResult
	defer func() { a.prefillEnded(r) }() // also after a panic
	a.runPrefill(a.env.Context, shaped, &r)
	return r.err
}

// wantsNewAttempt reports whether the leg hook requests another attempt, or none, instead of
// another decode engine for the same blocks.
func (a *attempt) wantsNewAttempt(err error) bool {
	d := a.askHook(err).Decision
	return d == abi.LegRetry || d == abi.LegGiveUp
}

// move replaces the placement of the attempt by p, which has another decode target. The host
// in prefill's answer may be valid for one decode engine and foreign to the other, so move
// reads the answer again.
func (a *attempt) move(p *coordinator.Placement) {
	a.p.Lease.Release()
	a.leavePair()
	a.p, a.c.Decode = p, p.Decode
	a.began.restarts = p.Decode.Restarts()
	before := a.prefill.handoff.Fallback
	if h, err := a.conn.ReadPrefill(&a.c, a.prefill.answer.B); err == nil { // no error is expected: the first read succeeded
		if a.prefill.handoff = h; h.Fallback != before {
			a.countFallback(&h)
		}
	}
	a.joinPair()
	a.env.Journal.Placed(p, a.env.Ask.Request.PromptTokens)
	a.setOrphanCleanup()
}
