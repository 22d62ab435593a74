package proxy

import (
	"context"
	"errors"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
)

// together reports whether prefill's answer shapes nothing, so that both legs
// are under way at the same time.
func (a *attempt) together() bool {
	return a.p.Flow == abi.FlowConcurrent || a.p.Flow == abi.FlowDecodeFirst
}

// concurrent sends both legs at once, or prefill's when all of decode's has been
// sent. The first that fails ends the other; the cause of that is what the
// client is told.
func (a *attempt) concurrent() error {
	ctx, cancel := context.WithCancelCause(a.x.ctx)
	defer cancel(nil)
	pctx, stop := context.WithCancelCause(a.x.ctx)
	defer stop(nil)
	pleg, pbody, err := a.shapePrefill() // here: an open stream gives the client's body back
	if err != nil {
		return err
	}
	if a.p.Flow == abi.FlowDecodeFirst {
		a.decodeSent = make(chan struct{})
	}
	a.prepareMerge()
	done := make(chan error, 1)
	if a.asksTiming() {
		a.prefillOver = make(chan struct{})
	}
	go func() {
		defer close(done)
		if a.prefillOver != nil {
			defer close(a.prefillOver)
		}
		done <- a.prefillBeside(pctx, pleg, pbody, cancel)
	}()
	defer func() { // also after a panic nothing of the leg outlives the attempt
		stop(errPeerLeg)
		for range done {
		}
		if a.late != nil {
			a.late.Stop()
		}
	}()
	err = a.decodeBeside(ctx)
	if err != nil {
		a.orphan.DecodeFailed = decodeOver(err)
		stop(errPeerLeg)
		perr := <-done
		if perr == nil && a.orphan.PrefillDone && a.handoff.Done && !a.orphan.KVRead && a.x.ctx.Err() == nil {
			a.cleanUp(errAnswered)
			return a.replyHandoff()
		}
		// Either may be at fault: each waits for the other, and tells the other of
		// its failure; who is heard first is chance.
		if timedOut(err) && !a.orphan.PrefillDone && silentLeg(err) == nil || refused(err) || refused(perr) {
			a.x.ask.Excluded = append(a.x.ask.Excluded, a.p.Prefill, a.p.Decode)
		}
		return peerError(err, perr)
	}
	a.settlePrefill(done, stop)
	return nil
}

// decodeBeside shapes the decode leg and runs it.
func (a *attempt) decodeBeside(ctx context.Context) error {
	body, err := a.bodyBuffer()
	if err != nil {
		return err
	}
	leg, err := a.conn.Decode(&a.c, nil, body)
	if err != nil {
		return err
	}
	return a.answerLeg(ctx, leg)
}

// prefillBeside runs the prefill leg beside the decode leg. Its failure ends
// decode with that cause, unless decode has taken over.
func (a *attempt) prefillBeside(ctx context.Context, leg connector.Leg, body *buffer.Buffer, cancel context.CancelCauseFunc) (err error) {
	defer body.Free()
	defer func() {
		if v := recover(); v != nil {
			a.x.journal.Panic(v)
			err = errPanicked
		}
		switch {
		case err == nil && a.handoff.Done:
			if a.verdict.CompareAndSwap(0, prefillFailed) {
				cancel(errAnswered)
			}
		case err == nil:
			a.prefillAnswered()
			a.awaitKV(cancel)
			a.p.Lease.PrefillDone()
			a.x.journal.PrefillDone()
		case a.verdict.CompareAndSwap(0, prefillFailed):
			cancel(err)
		}
	}()
	if a.decodeSent != nil {
		select {
		case <-a.decodeSent:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return a.prefill(ctx, leg)
}

// peerError tells which of two failed legs was the cause. Prefill's failure
// reaches decode through the engines, often before we cancel it; so decode is
// to blame only when its connection failed, or prefill did not.
func peerError(decode, prefill error) error {
	var p, d *legError
	if !errors.As(prefill, &p) || errors.As(decode, &d) && d.status == 0 && !timedOut(d) {
		return decode
	}
	return prefill
}

// decodeOver reports whether the decode leg failed in a way that leaves its engine
// nothing to do: its connection broke, or it answered with a failure of its own.
func decodeOver(err error) bool {
	var le *legError
	return errors.As(err, &le) && le.phase == abi.Decode && le.sent && le.code == 502 && le.status/100 != 4
}

// timedOut reports whether a leg failed by waiting in vain.
func timedOut(err error) bool {
	var le *legError
	return errors.As(err, &le) && le.code == 504
}

// settlePrefill ends the prefill leg of an exchange whose decode is done: it
// has answered or is about to, since the KV has arrived. The client does not
// wait for it; past the clean-up limit it is cut off and aborted.
func (a *attempt) settlePrefill(done <-chan error, stop context.CancelCauseFunc) {
	select {
	case <-done:
		return
	default:
	}
	calls := a.conn.Cleanup(&a.c, connector.Orphan{PrefillSent: true})
	job := a.cleanupJob(calls)
	// The leg still uses the attempt's record and buffers: wait here, after
	// the answer has been flushed, so that close finds nothing running.
	limit := time.Duration(a.x.cfg.Timeouts.Cleanup)
	a.x.client.Flush()
	// Over HTTP/2 the deadline of that write would reset the stream meanwhile.
	a.x.client.LimitWrites(limit + time.Duration(a.x.cfg.Server.WriteTimeout))
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
		stop(errPeerLeg)
		<-done
		a.x.s.cleanups.Start(job)
	}
}
