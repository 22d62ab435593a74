package attempt

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pdproxy/pdproxy/proxy/connector"
)

// errMerge wraps the error of a decode answer that cannot be completed with prefill's answer.
var errMerge = errors.New("complete the answer with prefill's answer")

// prepareMerge sets the merger if the client's answer needs the answers of both legs.
func (a *attempt) prepareMerge() {
	if m, ok := a.conn.(connector.Merger); ok && m.Merges(a.env.Request) {
		a.both.merger = m
		a.c.Merging = true
	}
}

// merges reports whether the proxy completes decode's answer with prefill's answer.
func (a *attempt) merges() bool { return a.both.merger != nil }

// belies reports whether err, the failure of a concurrent prefill leg, shows that decode answers
// with KV that prefill never computed: prefill's engine has answered, with an error.
func (a *attempt) belies(err error) bool {
	return connector.ComputesUnverified(a.conn) && (answeredWithError(err) || errors.Is(err, connector.ErrBadReply))
}

// awaitVerdict returns when prefill has answered, if its answer can belie an answer of decode that
// is otherwise complete. It waits for timeouts.cleanup at most. If prefill's answer is an error,
// awaitVerdict returns it.
func (a *attempt) awaitVerdict(ctx context.Context) error {
	if !a.both.runs() || a.both.over || !connector.ComputesUnverified(a.conn) {
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

// awaitPrefill returns when prefill's answer is complete, if decode's answer needs it. If
// prefill fails or exceeds a limit, ctx ends with that cause, and awaitPrefill returns it.
func (a *attempt) awaitPrefill(ctx context.Context) error {
	if !a.merges() {
		return nil
	}
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

// public returns the client's form of decode's whole answer. The error satisfies
// downstream.OwnFault or wraps errMerge.
func (a *attempt) public(answer []byte) ([]byte, error) {
	public := a.conn.Public(&a.c, answer)
	room := 0
	if len(public) != len(answer) { // it is a copy
		room = len(public)
	}
	if a.merges() {
		room += len(public) + len(a.prefill.answer.B)
	}
	if err := a.env.Client.Reserve(room); err != nil {
		return nil, err
	}
	return a.completed(public)
}

// completed returns decode's whole answer, completed with prefill's answer if necessary.
func (a *attempt) completed(answer []byte) ([]byte, error) {
	if !a.merges() {
		return answer, nil
	}
	whole, err := a.both.merger.Merge(nil, &a.prefill.handoff, answer, false)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errMerge, err)
	}
	return whole, nil
}

// completedEvents returns whole events, completed with prefill's answer if necessary. The result
// is valid until the next call.
func (a *attempt) completedEvents(events []byte) ([]byte, error) {
	if !a.merges() || len(events) == 0 {
		return events, nil
	}
	var err error
	if a.both.merged, err = a.both.merger.Merge(a.both.merged[:0], &a.prefill.handoff, events, true); err != nil {
		return nil, fmt.Errorf("%w: %w", errMerge, err)
	}
	return a.both.merged, nil
}
