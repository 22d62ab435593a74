package attempt

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
)

// concurrent sends both legs at the same time, or prefill's when all of decode's has been
// sent. The leg that fails first ends the other one; its error is what the client is told.
func (a *attempt) concurrent() error {
	ctx, cancel := context.WithCancelCause(a.env.Context)
	defer cancel(nil)
	pctx, stop := context.WithCancelCause(a.env.Context)
	defer stop(nil)
	shaped, body, err := a.shapePrefill() // here, because an open stream gives the client's body back
	if err != nil {
		return err
	}
	a.both.prefill = make(chan prefillResult, 1)
	if a.p.Flow == abi.FlowDecodeFirst {
		a.both.sent = make(chan struct{})
	}
	a.prepareMerge()
	go func() { a.both.prefill <- a.prefillBeside(pctx, shaped, body, cancel) }() // awaitPrefillEnd waits for it
	defer func() {                                                                // also after a panic nothing of the leg outlives the attempt
		stop(errPeerLeg)
		a.awaitPrefillEnd()
		if a.prefill.late != nil {
			a.prefill.late.Stop()
		}
	}()
	if err = a.decodeBeside(ctx); err == nil {
		a.settlePrefill(stop)
		return nil
	}
	a.orphan.DecodeFailed = decodeIsOver(err)
	stop(errPeerLeg)
	a.awaitPrefillEnd()
	perr := a.prefill.err
	if perr == nil && a.prefill.done && a.prefill.handoff.Done && !a.orphan.KVRead && a.env.Context.Err() == nil {
		a.cleanUp(errAnswered)
		return a.replyHandoff()
	}
	// Either engine may be at fault: each waits for the other and tells the other of its
	// failure. Which failure the proxy sees first is chance.
	if timedOut(err) && !a.prefill.done && unresponsiveLeg(err) == nil || answeredWithError(err) || answeredWithError(perr) {
		a.env.Ask.Excluded = append(a.env.Ask.Excluded, a.p.Prefill, a.p.Decode)
	}
	return firstCause(err, perr)
}

// decodeBeside shapes the decode leg and runs it.
func (a *attempt) decodeBeside(ctx context.Context) error {
	body, err := a.bodyBuffer()
	if err != nil {
		return err
	}
	shaped, err := a.conn.Decode(&a.c, nil, body)
	if err != nil {
		return err
	}
	return a.answerLeg(ctx, shaped)
}

// prefillBeside runs the prefill leg at the same time as the decode leg, in a goroutine of its
// own, and returns what the leg has left. Its failure ends decode with that cause, unless
// decode has taken over.
func (a *attempt) prefillBeside(ctx context.Context, shaped connector.Leg, body *buffer.Buffer, cancel context.CancelCauseFunc) (r prefillResult) {
	defer body.Free()
	defer func() {
		if v := recover(); v != nil {
			a.env.Journal.Panic(v)
			r.err = ErrPanicked
		}
		switch {
		case r.err == nil && r.handoff.Done:
			if a.both.winner.CompareAndSwap(0, prefillFailed) {
				cancel(errAnswered)
			}
		case r.err == nil:
			r.late = a.awaitKV(cancel)
			a.p.Lease.PrefillDone()
			a.env.Journal.PrefillDone()
		case a.both.winner.CompareAndSwap(0, prefillFailed):
			cancel(r.err)
		}
	}()
	if a.both.sent != nil {
		select {
		case <-a.both.sent:
		case <-ctx.Done():
			r.err = context.Cause(ctx)
			return r
		}
	}
	a.runPrefill(ctx, shaped, &r)
	return r
}

// awaitPrefillEnd returns when the prefill leg has ended.
func (a *attempt) awaitPrefillEnd() {
	if !a.both.over {
		a.takePrefill(<-a.both.prefill)
	}
}

// settlePrefill ends the prefill leg of an exchange whose decode is done: prefill has answered
// or is about to, because the KV has arrived. The client does not wait for it. After the limit
// of clean-ups the leg is cancelled and aborted.
func (a *attempt) settlePrefill(stop context.CancelCauseFunc) {
	if a.both.over {
		return
	}
	select {
	case r := <-a.both.prefill:
		a.takePrefill(r)
		return
	default:
	}
	calls := a.conn.Cleanup(&a.c, connector.Orphan{PrefillSent: true})
	job := a.cleanupJob(calls)
	// The leg still uses the exchange's record and buffers. So wait here, after the answer has
	// been sent, and close finds nothing running.
	limit := time.Duration(a.env.Config.Timeouts.Cleanup)
	a.env.Client.Flush()
	// Over HTTP/2 the deadline of that write would reset the stream meanwhile.
	a.env.Client.LimitWrites(limit + time.Duration(a.env.Config.Server.WriteTimeout))
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case r := <-a.both.prefill:
		a.takePrefill(r)
	case <-t.C:
		stop(errPeerLeg)
		a.awaitPrefillEnd()
		a.env.Cleanups.Start(job)
	}
}
