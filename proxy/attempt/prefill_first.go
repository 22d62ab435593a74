package attempt

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
)

// prefillFirst waits for prefill's answer, which shapes the decode leg. As long as no decode
// engine can have read the blocks, another decode engine may get them.
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
	if p, ok := a.env.Replacer.Pick(a.p); ok {
		a.move(p)
	}
	for {
		body, err := a.bodyBuffer()
		if err != nil {
			return err
		}
		shaped, err := a.conn.Decode(&a.c, &a.prefill.handoff, body)
		if err != nil {
			return err
		}
		err = a.answerLeg(a.env.Context, shaped)
		if err == nil || downstream.OwnFault(err) || maybeSent(err) || connector.PinsDecode(a.conn) || a.leaseOver() {
			return err
		}
		if a.wantsNewAttempt(err) {
			return err
		}
		p, ok := a.env.Replacer.Replace(a.p, err, a.hook)
		if !ok {
			return err
		}
		a.move(p)
	}
}

// prefillAlone runs the prefill leg, whose body is not needed afterwards.
func (a *attempt) prefillAlone(shaped connector.Leg, body *buffer.Buffer) error {
	defer body.Free()
	var r prefillResult
	defer func() { a.prefillEnded(r) }() // also after a panic
	a.runPrefill(a.env.Context, shaped, &r)
	return r.err
}

// wantsNewAttempt reports whether the leg hook wants another attempt, or none, instead of
// another decode engine for the same blocks.
func (a *attempt) wantsNewAttempt(err error) bool {
	d := a.askHook(err).Decision
	return d == abi.LegRetry || d == abi.LegGiveUp
}

// move makes p, which differs in the decode target, the placement of the attempt. The host
// that prefill's answer names may be right for one decode engine and foreign to the other, so
// the answer is read again.
func (a *attempt) move(p *coordinator.Placement) {
	a.p.Lease.Release()
	a.leavePair()
	a.p, a.c.Decode = p, p.Decode
	a.began.restarts = p.Decode.Restarts()
	before := a.prefill.handoff.Fallback
	if h, err := a.conn.ReadPrefill(&a.c, a.prefill.answer.B); err == nil { // as the first time
		if a.prefill.handoff = h; h.Fallback != before {
			a.countFallback(&h)
		}
	}
	a.joinPair()
	a.env.Journal.Placed(p, a.env.Ask.Request.PromptTokens)
	a.setOrphanCleanup()
}
