package attempt

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
)

// concurrent sends both legs at the same time. If the flow is decode-first, it sends the prefill
// leg after the whole decode leg has been sent. The leg that fails first ends the other leg, and
// the client gets the error of the first one.
func (a *attempt) concurrent() error {
	ctx, cancel := context.WithCancelCause(a.env.Context)
	defer cancel(nil)
	pctx, stop := context.WithCancelCause(a.env.Context)
	defer stop(nil)
	shaped, body, err := a.shapePrefill() // before decode begins, because an open stream frees the client's body
	if err != nil {
		return err
	}
	if err = a.registerOrphanCleanup(); err != nil {
		body.Free()
		return err
	}
	a.both.prefill = make(chan prefillResult, 1)
	if a.p.Flow == abi.FlowDecodeFirst {
		a.both.sent = make(chan struct{})
	}
	a.prepareMerge()
	go func() { a.both.prefill <- a.prefillBeside(pctx, shaped, body, cancel) }() // awaitPrefillEnd waits for it
	defer func() {                                                                // the leg must end before the attempt ends, also after a panic
		stop(errPeerLeg)
		a.awaitPrefillEnd()
		if a.prefill.expiry != nil {
			a.prefill.expiry.Stop()
		}
	}()
	if err = a.decodeBeside(ctx); err == nil {
		a.settlePrefill(stop)
		return nil
	}
	a.owed.DecodeFailed = decodeIsOver(err)
	stop(errPeerLeg)
	a.awaitPrefillEnd()
	perr := a.prefill.err
	if perr == nil && a.owed.PrefillDone && a.prefill.handoff.Done && !a.owed.KVRead && a.env.Context.Err() == nil {
		a.cleanUp(errAnswered)
		return a.replyHandoff()
	}
	// Either engine may be at fault: each engine waits for the other and reports its failure to
	// the other. So the proxy may see either failure first.
	if timedOut(err) && !a.owed.PrefillDone && unresponsiveLeg(err) == nil || answeredWithError(err) || answeredWithError(perr) {
		a.env.Ask.Excluded = append(a.env.Ask.Excluded, a.p.Prefill, a.p.Decode)
	}
	return firstCause(err, perr)
}

// decodeBeside shapes the decode leg and runs it.
func (a *attempt) decodeBeside(ctx context.Context) error {
	var shaped connector.Leg
	if err := a.shapeDecode(&shaped, nil); err != nil {
		return err
	}
	return a.answerLeg(ctx, &shaped)
}

// prefillBeside runs the prefill leg in its own goroutine, at the same time as the decode leg,
// and returns the result. If prefill fails before decode has the KV, its error ends decode. An
// error that belies decode's answer ends decode at any time.
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
			r.expiry = a.awaitKV(cancel)
			if a.owed.registered {
				a.p.Lease.SetOrphanCleanup(nil) // prefill writes to decode's blocks
			}
			a.p.Lease.PrefillDone()
			if a.env.Journal.Filters != nil {
				a.env.Journal.PrefillDone()
			}
		case a.both.winner.CompareAndSwap(0, prefillFailed), a.belies(r.err):
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

// settlePrefill ends the prefill leg after decode has succeeded. Prefill has answered or answers
// soon, because decode has the KV. The client does not wait: its answer is complete. After
// timeouts.cleanup the proxy cancels the leg and makes the engine abort it.
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
	calls := a.conn.Cleanup(&a.c, connector.Orphan{PrefillSent: true, KVRead: true})
	job := a.cleanupJob(calls)
	// The leg still uses the record and the buffers of the exchange, and close frees them. So
	// wait for the leg here, after the answer has been sent.
	limit := time.Duration(a.env.Config.Timeouts.Cleanup)
	a.env.Client.Flush()
	// Over HTTP/2 the deadline of that write would otherwise reset the stream during the wait.
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
