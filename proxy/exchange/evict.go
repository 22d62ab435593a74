package exchange

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// mayEvict adds to the claim that the request may end a running one of a lower class, and that the
// request itself may be ended, if policy.evict names a policy.
func (x *exchange) mayEvict(claim *admission.Claim) {
	if x.env.Config.Policy.Evict == config.EvictNone {
		return
	}
	claim.Evicts, claim.Prompt = true, x.req.PromptTokens
	if !admission.Sheddable(claim.Class.Priority) {
		return
	}
	ctx, end := context.WithCancelCause(x.env.Context)
	x.env.Context, x.endContext = ctx, end
	sent := new(atomic.Int64)
	x.env.Sent = sent
	journal := &x.journal
	claim.Evictable = &admission.Evictable{
		End: func(e *admission.EvictedError) { end(e) },
		Progress: func(r *abi.Evictable) { // before leave, so that the exchange is still this request's
			r.Sent = sent.Load()
			journal.Progress(r)
		},
	}
}

// evicted returns the eviction that has ended the request, nil for none.
func (x *exchange) evicted() *admission.EvictedError {
	var e *admission.EvictedError
	if x.endContext == nil || !errors.As(context.Cause(x.env.Context), &e) {
		return nil
	}
	return e
}

// noteEviction records that the request has ended for one of a higher class. The client learns when a new
// request may succeed, if it has no byte of an answer.
func (x *exchange) noteEviction(e *admission.EvictedError) {
	x.journal.Evicted(e.Class, e.For, e.Reason(), e.Policy)
	x.client.AnswerHeader().Set("Retry-After", strconv.FormatInt(e.RetrySeconds(), 10))
}
