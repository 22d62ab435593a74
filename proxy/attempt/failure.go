package attempt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Causes with which the context of a leg ends, beside downstream.ErrDraining.
var (
	errPeerLeg = errors.New("the other leg failed")
	// ErrPanicked is the error of an attempt that panicked.
	ErrPanicked = errors.New("the proxy failed")
	errKVLate   = errors.New("the KV did not come over in time")
	// errAnswered ends a decode leg whose prefill had the whole answer.
	errAnswered = errors.New("prefill had the whole answer")
)

// Reasons of failures of a transfer, labels of pdproxy_leg_errors_total.
const (
	reasonKVLate         = "kv_timeout" // the KV did not come in time
	reasonKVUnresponsive = "kv_silent"  // the engine that has the KV does not respond
	reasonKVLease        = "kv_lease"   // the leg would have come after prefill had freed the blocks
)

// Error is a failed leg. classify makes it, and nothing changes it. Its text names the
// phase and the engine, and holds nothing of the bodies.
type Error struct {
	Phase        abi.Phase
	Target       engine.Target
	Reason       string        // label of pdproxy_leg_errors_total
	Status       int           // the engine's HTTP status; 0: none
	Code         int           // the status for the client if no other engine can answer
	Reply        *Reply        // the engine's own answer, if that goes to the client; nil: code does
	sent         bool          // the request may have reached the engine
	Permanent    bool          // the request is at fault, not the engine: it is not tried again
	Pair         *engine.Pair  // nil unless only the pair explains the failure: decode answers, but not with this KV
	Unresponsive engine.Target // stopped responding: the leg's engine, or the one that has the leg's KV; zero: none
	elapsed      time.Duration
	exempt       bool // the engine is not to blame; its breaker is not charged
	Reserved     bool // the retry budget has reserved a retry for this failure
	err          error
}

// Reply is the answer of an engine that goes to the client as the engine wrote it: a
// 4xx.
type Reply struct {
	body        []byte
	contentType string
	retryAfter  string // "" without such a line
}

// Error implements error.
func (e *Error) Error() string {
	if e.err != nil {
		return fmt.Sprintf("%s leg on engine %s failed: %s: %v", e.Phase, e.Target.Name(), e.Reason, e.err)
	}
	return fmt.Sprintf("%s leg on engine %s failed: %s", e.Phase, e.Target.Name(), e.Reason)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.err }

// Public returns what the client is told.
func (e *Error) Public() *openai.Error {
	kind, code := "failed", "leg_failed"
	if e.Code == 504 {
		kind, code = "timed out", "leg_timeout"
	}
	return &openai.Error{
		Status:  e.Code,
		Type:    "upstream_error",
		Code:    code,
		Message: fmt.Sprintf("the %s leg on engine %q %s (%s)", e.Phase, e.Target.Name(), kind, e.Reason),
	}
}

// failure is what was seen of a failure where it happened: an Error for which nobody has
// been blamed for. Nothing changes it; classify makes the Error of it.
type failure Error

// Error implements error.
func (f *failure) Error() string { return (*Error)(f).Error() }

// Unwrap returns the cause.
func (f *failure) Unwrap() error { return f.err }

// asLegError returns the failure of a leg that err tells of, classified or not; nil: none.
// The outermost failure counts: the cause inside the failure of one leg may be the failure
// of the other leg.
func asLegError(err error) *Error {
	var of interface {
		error
		ofLeg() *Error
	}
	if errors.As(err, &of) {
		return of.ofLeg()
	}
	return nil
}

func (e *Error) ofLeg() *Error   { return e }
func (f *failure) ofLeg() *Error { return (*Error)(f) }

// failed is the failure of a leg by an error of the upstream client or of the proxy's own
// means.
func (l *leg) failed(err error) *failure {
	f := &failure{Phase: l.Phase, Target: l.target, Reason: "reset", Code: 502, sent: true, err: err}
	var ue *upstream.Error
	if downstream.OwnFault(err) {
		var oe *openai.Error
		errors.As(err, &oe)
		f.Reason, f.Code, f.exempt = oe.Code, 503, true
		return f
	}
	if errors.As(err, &ue) {
		f.sent = ue.Sent
		if ue.Local {
			f.Reason, f.Code, f.exempt = downstream.ErrOverloaded.Code, downstream.ErrOverloaded.Status, true
			f.err = fmt.Errorf("%w: %w", downstream.ErrOverloaded, err)
			return f
		}
		f.Reason = ue.Op
		if ue.Timeout {
			f.Reason, f.Code = "timeout", 504
		}
	}
	if errors.Is(err, upstream.ErrEvicted) {
		f.Reason, f.Code, f.Unresponsive, f.exempt = "silent", 504, l.target, true
	}
	return f
}

// failedBy is the failure of a leg for a reason that its answer shows.
func (l *leg) failedBy(reason string, code int, err error) *failure {
	return &failure{Phase: l.Phase, Target: l.target, Reason: reason, Code: code, sent: true, err: err}
}

// rejected is the failure of a leg by an answer that is no success. A 4xx is the request's
// fault and goes to the client as the engine wrote it. All other statuses may go better on
// another engine, and so may a 401 if the client's own key was not sent. exempt says that
// the engine is not to blame for a 5xx.
func (a *attempt) rejected(l *leg, resp *upstream.Response, answer []byte, exempt bool) *failure {
	f := &failure{Phase: l.Phase, Target: l.target, Reason: fmt.Sprintf("status_%d", resp.Status), Status: resp.Status, Code: 502, sent: true}
	ownKey := l.target.APIKey != "" || a.env.Key != ""
	switch {
	case resp.Status/100 == 4 && !(resp.Status == 401 && ownKey):
		reply, err := a.copyReply(answer, resp.Get("Content-Type"), resp.Get("Retry-After"))
		if err != nil {
			return l.failed(err)
		}
		f.Permanent, f.Reply = upstream.RequestAtFault(resp.Status), reply
	case resp.Status/100 == 5:
		f.exempt = exempt
	}
	return f
}

// failedInside is the failure of a leg inside a 200: vLLM and SGLang report what happens
// before the first token of a stream as an event that has the status, and SGLang reports
// some aborts as a finish reason. err may be nil.
func (a *attempt) failedInside(l *leg, reason string, status int, data []byte, err error) *failure {
	f := &failure{Phase: l.Phase, Target: l.target, Reason: reason, Status: status, Code: 502, sent: true, err: err}
	if status/100 == 4 {
		reply, noMemory := a.copyReply(data, "application/json", "")
		if noMemory != nil {
			return l.failed(noMemory)
		}
		f.Permanent, f.Reply = upstream.RequestAtFault(status), reply
	}
	return f
}

// copyReply copies an engine's answer for the client. The error says that there is no memory
// for the copy.
func (a *attempt) copyReply(answer []byte, contentType, retryAfter string) (*Reply, error) {
	if err := a.env.Client.Reserve(len(answer)); err != nil {
		return nil, err
	}
	return &Reply{body: bytes.Clone(answer), contentType: contentType, retryAfter: retryAfter}, nil
}

// classify makes the error of a leg that failed with f: it says which engine or pair is to
// blame.
func (a *attempt) classify(l *leg, f *failure) *Error {
	e := Error(*f)
	e.elapsed = time.Since(l.Start)
	if errors.Is(f.err, errKVLate) {
		e.Pair = a.pair
		return &e
	}
	if l.Phase == abi.Decode && a.pair != nil && !a.orphan.KVRead && f.Unresponsive.IsZero() {
		switch {
		case !f.sent:
			if f.Code == 504 && a.leaseOver() { // no engine is at fault: the leg waited for its turn at max_conns
				e.Reason, e.exempt = reasonKVLease, true
			}
		case f.Status/100 == 5: // decode answers, but not with the KV of this prefill
			e.Pair = a.pair
		case l.kvBound && f.Code == 504:
			e.Pair, e.Reason = a.pair, reasonKVLate
		}
	}
	e.exempt = e.exempt || l.short && e.Code == 504
	e.Reserved = l.reserved
	if l.starved && !e.Unresponsive.IsZero() {
		e.Reason, e.Unresponsive = reasonKVUnresponsive, a.p.Prefill
	}
	return &e
}

// legEnded notes a leg that did not succeed, and returns its error. A leg that ended with
// its own context is no failure of an engine: the cause of the context comes back instead.
// A leg that failed by itself has failed, even if its context has ended since: the failure
// of one concurrent leg reaches the other through the engines as well.
func (a *attempt) legEnded(ctx context.Context, l *leg, err error) error {
	var f *failure
	failed := errors.As(err, &f)
	cause := context.Cause(ctx)
	switch {
	case ctx.Err() != nil && errors.Is(cause, errKVLate):
		f = l.failedBy(reasonKVLate, 504, errKVLate)
	case ctx.Err() != nil && (!failed || errors.Is(err, ctx.Err()) || errors.Is(err, cause)):
		a.env.Journal.LegCancelled(l.Leg)
		return cause
	case !failed: // the client's side failed, not the engine
		a.env.Journal.LegEnded(l.Leg, "client")
		return err
	}
	e := a.classify(l, f)
	a.legFailed(l, e)
	return e
}

// legFailed counts a failed leg, and charges its engine's breaker or its pair unless the
// request, the proxy or the limit of the plan policy is to blame.
func (a *attempt) legFailed(l *leg, e *Error) {
	if downstream.OwnFault(e) {
		a.env.Journal.LegEnded(l.Leg, e.Reason)
		return
	}
	a.env.Journal.LegFailed(l.Leg, e.Reason)
	if e.Status == 0 && e.Unresponsive.IsZero() {
		e.Target.ProbeSoon()
	}
	switch {
	case e.exempt:
	case engine.IsRefused(e.err):
		e.Target.Refused()
	case e.Permanent:
		e.Target.Breaker.Success()
	case e.Pair != nil:
		if e.Pair.Failure(e.Reason); e.Reason == reasonKVLate { // decode may also hang by itself
			e.Target.Breaker.Failure()
		}
	default:
		e.Target.Breaker.Failure()
	}
}

func (a *attempt) legSucceeded(l *leg) {
	l.target.Breaker.Success()
	a.env.Journal.LegSucceeded(l.Leg, l.target.Spec.Connector)
}

// Sent reports whether a failed leg may have reached its engine.
func Sent(err error) bool { return maybeSent(err) }

// maybeSent reports whether a failed leg may have reached its engine.
func maybeSent(err error) bool {
	if e := asLegError(err); e != nil {
		return e.sent
	}
	return !errors.Is(err, coordinator.ErrNoTarget)
}

// answeredWithError reports whether the engine of a failed leg answered with an error
// status.
func answeredWithError(err error) bool {
	e := asLegError(err)
	return e != nil && e.Status != 0
}

// timedOut reports whether a leg failed by a timeout.
func timedOut(err error) bool {
	e := asLegError(err)
	return e != nil && e.Code == 504
}

// decodeIsOver reports whether the decode leg failed in a way that leaves its engine
// nothing to do: its connection broke, or the engine answered with a failure of its own.
func decodeIsOver(err error) bool {
	e := asLegError(err)
	return e != nil && e.Phase == abi.Decode && e.sent && e.Code == 502 && e.Status/100 != 4
}

// unresponsiveLeg returns the leg that was given up because an engine does not respond;
// nil: err tells of none.
func unresponsiveLeg(err error) *Error {
	if e := asLegError(err); e != nil && !e.Unresponsive.IsZero() {
		return e
	}
	return nil
}

// firstCause returns which of two failed concurrent legs was the cause. A failure of
// prefill reaches decode through the engines, often before the proxy cancels decode. So
// decode is to blame only if its connection failed, or if prefill did not fail.
func firstCause(decode, prefill error) error {
	d, p := asLegError(decode), asLegError(prefill)
	if p == nil || d != nil && d.Status == 0 && !timedOut(decode) {
		return decode
	}
	return prefill
}

// firstLegError returns the first failure of a leg, else the first error.
func firstLegError(errs []error) (first error) {
	for _, err := range errs {
		if asLegError(err) != nil {
			return err
		}
		if first == nil {
			first = err
		}
	}
	return first
}
