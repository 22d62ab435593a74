package attempt

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
)

// errMerge wraps the error of a decode answer that cannot be completed with prefill's answer.
var errMerge = errors.New("complete the answer with prefill's answer")

// concurrentLegs is the state of two legs that run at the same time. The zero value belongs to
// an attempt whose legs do not.
type concurrentLegs struct {
	winner  atomic.Uint32    // the event that decided the attempt first: one of the constants below, 0: none yet
	sent    chan struct{}    // closed when all of the decode leg has been sent, if prefill waits for that; else nil
	prefill chan prefillLeg  // gets one result, when the prefill leg has ended
	over    bool             // the result has been taken; the goroutine of the exchange owns it
	opened  atomic.Bool      // decode has opened its answer, so it does not wait for the KV any more
	merger  connector.Merger // completes decode's answer with prefill's answer; nil: not needed
	merged  []byte           // memory for merged events
}

// The events that decide concurrent legs. After decodeTook decode has the KV, and a failure of
// prefill no longer ends decode, unless it belies decode's answer.
const (
	decodeTook    = 1
	prefillFailed = 2
	kvLate        = 3 // prefill has answered, but decode has not got the KV in time
)

// runConcurrent sends both legs at the same time. If the flow is decode-first, it sends the prefill
// leg after the whole decode leg has been sent. The leg that fails first ends the other leg, and
// the client gets the error of the first one.
func (a *attempt) runConcurrent() error {
	ctx, cancel := context.WithCancelCause(a.env.Context)
	defer cancel(nil)
	pctx, stop := context.WithCancelCause(a.env.Context)
	defer stop(nil)
	shaped, err := a.shapePrefill() // before decode begins, because an open stream frees the client's body
	if err != nil {
		return err
	}
	if err = a.registerOrphanCleanup(); err != nil {
		return err
	}
	a.both.prefill = make(chan prefillLeg, 1)
	if a.p.Flow == abi.FlowDecodeFirst {
		a.both.sent = make(chan struct{})
	}
	if m, ok := a.conn.(connector.Merger); ok && m.Merges(a.env.Request) {
		a.both.merger, a.c.Merging = m, true
	}
	body := a.prefillBody
	a.prefillBody = nil
	// The goroutine of prefill frees body. awaitPrefillEnd waits for it: the leg must end before the
	// attempt ends, also after a panic.
	go func() { a.both.prefill <- a.prefillBeside(pctx, shaped, body, cancel) }()
	defer func() {
		stop(errPeerLeg)
		a.awaitPrefillEnd()
	}()
	if err = a.answerLeg(ctx); err == nil {
		a.settlePrefill(stop)
		return nil
	}
	a.decodeFailed = decodeIsOver(err)
	stop(errPeerLeg)
	a.awaitPrefillEnd()
	perr := a.prefill.err
	if perr == nil && a.prefill.done && a.prefill.handoff.Done && !a.kvRead && a.env.Context.Err() == nil {
		a.cleanUp(errAnswered)
		return a.replyHandoff()
	}
	// Either engine may be at fault: each engine waits for the other and reports its failure to
	// the other. So the proxy may see either failure first.
	if timedOut(err) && !a.prefill.done && unresponsiveLeg(err) == nil || answeredWithError(err) || answeredWithError(perr) {
		a.env.Ask.Excluded = append(a.env.Ask.Excluded, a.p.Prefill, a.p.Decode)
	}
	return firstCause(err, perr)
}

// prefillBeside runs the prefill leg in its own goroutine, at the same time as the decode leg,
// and returns the result. If prefill fails before decode has the KV, its error ends decode. An
// error that belies decode's answer ends decode at any time.
func (a *attempt) prefillBeside(ctx context.Context, shaped connector.Leg, body *buffer.Buffer, cancel context.CancelCauseFunc) (r prefillLeg) {
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
			if a.registered {
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

// awaitKV starts a timer that cancels a concurrent decode leg if decode does not get the KV in
// time. The goroutine of prefill calls awaitKV after prefill has answered. The timer may be nil;
// the end of the attempt stops it.
func (a *attempt) awaitKV(cancel context.CancelCauseFunc) *time.Timer {
	if !a.env.Request.Stream {
		return nil
	}
	return time.AfterFunc(a.kvLimit(), func() {
		if !a.both.opened.Load() && a.both.winner.CompareAndSwap(0, kvLate) {
			cancel(errKVLate)
		}
	})
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

// takePrefill stores the result of a concurrent prefill leg.
func (a *attempt) takePrefill(r prefillLeg) {
	a.both.over, a.prefill = true, r
	if r.begun {
		a.env.tries[abi.Prefill]++
	}
}

// claimKV reports whether decode has read the KV: its answer has content, or has been opened and
// the engine has reported no failure. It returns false if prefill has failed before.
func (a *attempt) claimKV() bool { return a.both.winner.CompareAndSwap(0, decodeTook) }

// belies reports whether err, the failure of a concurrent prefill leg, shows that decode answers
// with KV that prefill never computed: prefill's engine has answered, with an error.
func (a *attempt) belies(err error) bool {
	return connector.ComputesUnverified(a.conn) && (answeredWithError(err) || errors.Is(err, connector.ErrBadReply))
}

// awaitVerdict returns when prefill has answered, if its answer can belie an answer of decode that
// is otherwise complete. It waits for timeouts.cleanup at most. If prefill's answer is an error,
// awaitVerdict returns it.
func (a *attempt) awaitVerdict(ctx context.Context) error {
	if a.both.over || !connector.ComputesUnverified(a.conn) {
		return nil
	}
	select {
	case r := <-a.both.prefill: // nearly always: prefill answers when the transfer has ended
		a.takePrefill(r)
	default:
		limit := time.NewTimer(time.Duration(a.env.Config.Timeouts.Cleanup))
		defer limit.Stop()
		select {
		case r := <-a.both.prefill:
			a.takePrefill(r)
		case <-limit.C:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if a.belies(a.prefill.err) {
		return a.prefill.err
	}
	return nil
}

// awaitPrefill returns when prefill's answer is complete, for a merger. If prefill fails or exceeds
// a limit, ctx ends with that cause, and awaitPrefill returns it.
func (a *attempt) awaitPrefill(ctx context.Context) error {
	if !a.both.over {
		select {
		case r := <-a.both.prefill:
			a.takePrefill(r)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if a.prefill.err == nil && !a.prefill.handoff.Done {
		return nil
	}
	<-ctx.Done() // prefill's goroutine has ended it
	return context.Cause(ctx)
}

// completedEvents returns whole events, completed by the merger with prefill's answer. The result
// is valid until the next call.
func (a *attempt) completedEvents(events []byte) ([]byte, error) {
	var err error
	if a.both.merged, err = a.both.merger.Merge(a.both.merged[:0], &a.prefill.handoff, events, true); err != nil {
		return nil, fmt.Errorf("%w: %w", errMerge, err)
	}
	return a.both.merged, nil
}
