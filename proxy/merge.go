package proxy

import (
	"context"
	"errors"
	"fmt"

	"github.com/pdproxy/pdproxy/proxy/connector"
)

// errMerge is a decode answer that cannot be completed from prefill's.
var errMerge = errors.New("complete the answer from prefill's")

// merge is the completing of decode's answer from prefill's. The zero value
// completes nothing.
type merge struct {
	merger   connector.Merger
	answered chan struct{} // closed when prefill has answered well
	buf      []byte        // of the events
}

// prepareMerge readies the attempt for a request whose answer needs both legs'.
func (a *attempt) prepareMerge() {
	if m, ok := a.conn.(connector.Merger); ok && m.Merges(&a.x.req) {
		a.merge = merge{merger: m, answered: make(chan struct{})}
		a.c.Merging = true
	}
}

// prefillAnswered lets awaitPrefill go on.
func (a *attempt) prefillAnswered() {
	if a.merge.merger != nil {
		close(a.merge.answered)
	}
}

// awaitPrefill returns when all is there that decode's answer needs of prefill.
// A prefill that fails or hangs ends ctx, with that cause.
func (a *attempt) awaitPrefill(ctx context.Context) error {
	if a.merge.merger == nil {
		return nil
	}
	select {
	case <-a.merge.answered:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// public is decode's whole answer as the client gets it. The error is downstream.ErrMemory or
// an errMerge.
func (a *attempt) public(answer []byte) ([]byte, error) {
	public := a.conn.Public(&a.c, answer)
	room := 0
	if len(public) != len(answer) { // it is a copy
		room = len(public)
	}
	if a.merge.merger != nil {
		room += len(public) + len(a.answer.B)
	}
	if err := a.x.client.Reserve(room); err != nil {
		return nil, err
	}
	return a.completed(public)
}

// completed gives decode's whole answer completed from prefill's.
func (a *attempt) completed(answer []byte) ([]byte, error) {
	if a.merge.merger == nil {
		return answer, nil
	}
	whole, err := a.merge.merger.Merge(nil, &a.handoff, answer, false)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errMerge, err)
	}
	return whole, nil
}

// completedEvents gives whole events completed from prefill's answer, in memory
// that is good until the next call.
func (a *attempt) completedEvents(events []byte) ([]byte, error) {
	if a.merge.merger == nil || len(events) == 0 {
		return events, nil
	}
	var err error
	if a.merge.buf, err = a.merge.merger.Merge(a.merge.buf[:0], &a.handoff, events, true); err != nil {
		return nil, fmt.Errorf("%w: %w", errMerge, err)
	}
	return a.merge.buf, nil
}
