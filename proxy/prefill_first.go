package proxy

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
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
	a.x.journal.PrefillDone()
	if a.prefill.handoff.Done {
		return a.replyHandoff()
	}
	a.pick()
	for {
		body, err := a.bodyBuffer()
		if err != nil {
			return err
		}
		shaped, err := a.conn.Decode(&a.c, &a.prefill.handoff, body)
		if err != nil {
			return err
		}
		err = a.answerLeg(a.x.ctx, shaped)
		if err == nil || downstream.OwnFault(err) || maybeSent(err) || connector.PinsDecode(a.conn) || a.leaseOver() {
			return err
		}
		if a.wantsNewAttempt(err) || !a.moveDecode(err) {
			return err
		}
	}
}

// prefillAlone runs the prefill leg, whose body is not needed afterwards.
func (a *attempt) prefillAlone(shaped connector.Leg, body *buffer.Buffer) error {
	defer body.Free()
	var r prefillResult
	defer func() { a.prefillEnded(r) }() // also after a panic
	a.runPrefill(a.x.ctx, shaped, &r)
	return r.err
}

// wantsNewAttempt reports whether the leg hook wants another attempt, or none, instead of
// another decode engine for the same blocks.
func (a *attempt) wantsNewAttempt(err error) bool {
	d := a.askHook(err).decision
	return d == abi.LegRetry || d == abi.LegGiveUp
}

// moveDecode places the decode leg, which failed with err, again, with the prefill target and
// the disagg id as they are. False: it stays failed.
func (a *attempt) moveDecode(err error) bool {
	x := a.x
	x.exclude(err, a.hook)
	x.route.Relax()
	p, placeErr := a.placeDecode()
	if placeErr != nil {
		return false
	}
	if !x.mayRetry(err, a.hook) {
		p.Lease.Release()
		return false
	}
	a.move(p)
	return true
}

// placeDecode asks for another decode target for the prefill target and the disagg id of the
// attempt.
func (a *attempt) placeDecode() (*coordinator.Placement, error) {
	ask := &a.x.ask
	ask.Prefill, ask.ID = a.p.Prefill, a.p.ID
	p, err := a.x.s.deps.Coordinator.Place(a.x.ctx, ask)
	ask.Prefill, ask.ID = engine.Target{}, 0
	return p, err
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
	a.x.placed(p)
	a.setOrphanCleanup()
}

// pick lets the picker of a sidecar choose decode for a prefill that has answered. Without a
// usable answer decode stays the engine of the place policy.
func (a *attempt) pick() {
	x := a.x
	if !x.route.Pick(a.p.Decode.Instance) {
		return
	}
	p, err := a.placeDecode()
	if err != nil {
		x.route.DropPick()
		return
	}
	a.move(p)
}
