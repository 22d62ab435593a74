package attempt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
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
	errKVLate   = errors.New("the KV did not arrive in time")
	// errAnswered ends a decode leg whose prefill had the whole answer.
	errAnswered = errors.New("prefill had the whole answer")
)

// Reasons of failures of a transfer, labels of pdproxy_leg_errors_total.
const (
	reasonKVLate         = "kv_timeout" // the KV did not arrive in time
	reasonKVUnresponsive = "kv_silent"  // the engine that has the KV does not respond
	reasonKVLease        = "kv_lease"   // prefill would have freed the blocks before the leg arrived
)

// Error is a failed leg. classify makes an Error; after that it is immutable. The text names
// the phase and the engine, and contains nothing of the bodies.
type Error struct {
	Phase        abi.Phase
	Target       engine.Target
	Reason       string        // label of pdproxy_leg_errors_total
	Status       int           // the engine's HTTP status; 0: none
	Code         int           // the status for the client if no other engine can answer
	Reply        *Reply        // the engine's own answer, if the client gets it; nil: the client gets Code
	sent         bool          // the request may have reached the engine
	Permanent    bool          // the request is at fault, not the engine: it is not retried
	Overloaded   bool          // the engine works, but has too many requests: see openai.Overloaded
	Pair         *engine.Pair  // nil unless only the pair explains the failure: decode answers, but not with this KV
	Unresponsive engine.Target // stopped responding: the leg's engine, or the one that has the leg's KV; zero: none
	elapsed      time.Duration
	exempt       bool // the engine is not at fault; its breaker does not count the failure
	Reserved     bool // a retry after this failure needs nothing from the retry budget
	Moved        bool // the proxy has ended the leg, because the engine drains: nothing has failed
	err          error
}

// Reply is the answer of an engine that refused a request: a 4xx, or a 503 for lack of room. The
// client gets the answer unchanged.
type Reply struct {
	header http.Header // without the lines of the connection; the body has its Content-Encoding
	body   []byte
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

// causes are the texts of failures without an error of their own, by reason.
var causes = map[string]string{
	"aborted":        errAborted.Error(),
	"bad_answer":     "the answer has another form than the request",
	"drained":        "the engine drains, and the proxy moved the stream",
	"empty_answer":   "the engine ended the answer without content",
	"error_answer":   errErrorEvent.Error(),
	"error_event":    errErrorEvent.Error(),
	"no_end":         errNoEnd.Error(),
	"other_endpoint": "the gateway sent the request to another engine",
	"other_prompt":   "the engine computed another prompt than the engine before",
	"timeout":        "the answer did not begin in time",
}

// cause returns what the log says about the failure, for explain.
func (e *Error) cause() string {
	if e.err != nil {
		return e.err.Error()
	}
	if text, known := causes[e.Reason]; known {
		return text
	}
	if e.Status != 0 {
		return fmt.Sprintf("the engine answered with status %d", e.Status)
	}
	return ""
}

// Public returns the error that the client receives.
func (e *Error) Public() *openai.Error {
	kind, code := "failed", openai.CodeLegFailed
	if e.Code == 504 {
		kind, code = "timed out", openai.CodeLegTimeout
	}
	return openai.NewError(code, fmt.Sprintf("the %s leg on engine %q %s (%s)", e.Phase, e.Target.Name(), kind, e.Reason))
}

// failure describes a failed leg before classify decides which engine or pair is at fault. A
// failure is immutable; classify makes an Error from it.
type failure Error

// Error implements error.
func (f *failure) Error() string { return (*Error)(f).Error() }

// Unwrap returns the cause.
func (f *failure) Unwrap() error { return f.err }

// asLegError returns the failure of a leg that err contains, classified or not, or nil. It
// returns the outermost failure, because the cause of one leg's failure may be the failure of
// the other leg.
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

// overloaded reports whether an engine without room refused a leg. It has done nothing for the leg.
func overloaded(err error) bool {
	e := asLegError(err)
	return e != nil && e.Overloaded
}

// decodeIsOver reports whether the decode leg failed in a way that leaves its engine
// nothing to do: its connection broke, or the engine answered with a failure of its own.
func decodeIsOver(err error) bool {
	e := asLegError(err)
	return e != nil && e.Phase == abi.Decode && e.sent && e.Code == 502 && e.Status/100 != 4
}

// unresponsiveLeg returns the failure of a leg that the proxy gave up because an engine does not
// respond, or nil if err contains no such failure.
func unresponsiveLeg(err error) *Error {
	if e := asLegError(err); e != nil && !e.Unresponsive.IsZero() {
		return e
	}
	return nil
}

// firstCause returns which of two failed concurrent legs was the cause. A failure of
// prefill reaches decode through the engines, often before the proxy cancels decode. So
// decode is at fault only if its connection failed, if it had no room, or if prefill did not fail.
func firstCause(decode, prefill error) error {
	d, p := asLegError(decode), asLegError(prefill)
	if p == nil || d != nil && d.Overloaded && !p.Overloaded || d != nil && d.Status == 0 && !timedOut(decode) {
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

// failed returns the failure of a leg that ended with an error of the upstream client, or
// because the proxy lacks memory or descriptors.
func (l *leg) failed(err error) *failure {
	f := &failure{Phase: l.Phase, Target: l.target, Reason: "reset", Code: 502, sent: true, err: err}
	var ue *upstream.Error
	if downstream.OwnFault(err) {
		var oe *openai.Error
		errors.As(err, &oe)
		f.Reason, f.Code, f.exempt = oe.Code.String(), 503, true
		return f
	}
	if errors.As(err, &ue) {
		f.sent = ue.Sent
		if ue.Local {
			f.Reason, f.Code, f.exempt = downstream.ErrOverloaded.Code.String(), downstream.ErrOverloaded.Status, true
			f.err = fmt.Errorf("%w: %w", downstream.ErrOverloaded, err)
			return f
		}
		f.Reason = ue.Op
		if ue.Timeout {
			f.Reason, f.Code = "timeout", 504
		}
	}
	switch {
	case !errors.Is(err, upstream.ErrEvicted):
	case l.moved:
		f.Reason, f.Code, f.Moved, f.err = "drained", 504, true, nil // 504: the engine has not ended it
	default:
		f.Reason, f.Code, f.Unresponsive, f.exempt = "silent", 504, l.target, true
	}
	return f
}

// failedBy returns the failure of a leg for a reason that its answer shows.
func (l *leg) failedBy(reason string, code int, err error) *failure {
	return &failure{Phase: l.Phase, Target: l.target, Reason: reason, Code: code, sent: true, err: err}
}

// rejected returns the failure of a leg whose answer is not a 2xx. For a 4xx the request is at
// fault, and the client gets the engine's answer unchanged. With any other status another
// engine may succeed, and also after a 401 if the engine did not get the client's own key. If no
// other engine has room, the client gets the answer of the engine that had none. A
// remote may blame the operator's key or account: see blamesOperator. If exempt is set, the
// engine is not at fault for a 5xx.
func (a *attempt) rejected(l *leg, resp *upstream.Response, answer []byte, exempt bool) *failure {
	status := openai.TrueStatus(a.env.Request.API, resp.Status, answer)
	f := &failure{Phase: l.Phase, Target: l.target, Reason: fmt.Sprintf("status_%d", status), Status: status, Code: 502, sent: true}
	ownKey := l.target.APIKey != "" || a.env.Key != ""
	switch {
	case l.target.IsRemote() && blamesOperator(status):
	case status/100 == 4 && !(status == 401 && ownKey), openai.Overloaded(status, resp.Get("Retry-After"), answer):
		return a.refusedBy(l, f, replyHeader(l.target, resp), answer)
	case status/100 == 5:
		f.exempt = exempt
	}
	return f
}

// failedInside returns the failure of a leg whose answer has status 200 and reports an error
// inside: vLLM and SGLang report an error before the first token of a stream as an event that
// contains the status, and SGLang reports some aborts as a finish reason. err may be nil.
func (a *attempt) failedInside(l *leg, reason string, status int, data []byte, err error) *failure {
	f := &failure{Phase: l.Phase, Target: l.target, Reason: reason, Status: status, Code: 502, sent: true, err: err}
	if (status/100 == 4 || openai.Overloaded(status, "", data)) && !(l.target.IsRemote() && blamesOperator(status)) {
		return a.refusedBy(l, f, http.Header{"Content-Type": {"application/json"}}, data)
	}
	return f
}

// refusedBy makes f the failure of a leg that a working engine has refused with an answer for the
// client, which refusedBy copies.
func (a *attempt) refusedBy(l *leg, f *failure, header http.Header, answer []byte) *failure {
	if err := a.env.Client.Reserve(len(answer)); err != nil {
		return l.failed(err)
	}
	f.Reply = &Reply{header: header, body: bytes.Clone(answer)}
	f.Permanent = upstream.RequestAtFault(f.Status)
	f.Overloaded = f.Status == http.StatusTooManyRequests || f.Status == http.StatusServiceUnavailable
	return f
}

// classify makes the error of a leg that failed with f. It decides which engine or pair is at
// fault.
func (a *attempt) classify(l *leg, f *failure) *Error {
	e := Error(*f)
	e.elapsed = time.Since(l.Start)
	if errors.Is(f.err, errKVLate) {
		e.Pair = a.pair
		return &e
	}
	if l.Phase == abi.Decode && a.pair != nil && !a.kvRead && f.Unresponsive.IsZero() {
		switch {
		case !f.sent:
			if f.Code == 504 && a.leaseOver() { // no engine is at fault: the leg waited for a free connection (max_conns)
				e.Reason, e.exempt = reasonKVLease, true
			}
		case f.Overloaded:
		case f.Status/100 == 5: // decode answers, but not with the KV of this prefill
			e.Pair = a.pair
		case l.kvBound && f.Code == 504:
			e.Pair, e.Reason = a.pair, reasonKVLate
		}
	}
	if l.Phase == abi.Prefill && a.concurrent && a.pair != nil && f.sent && f.Code == 504 && !l.short && f.Unresponsive.IsZero() {
		e.Pair = a.pair // prefill waits for the blocks of decode
	}
	e.exempt = e.exempt || l.short && e.Code == 504
	e.Reserved = l.reserved
	if l.starved && !e.Unresponsive.IsZero() {
		e.Reason, e.Unresponsive = reasonKVUnresponsive, a.p.Prefill
	}
	return &e
}

// legEnded records a leg that did not succeed, and returns its error. If the leg ended because
// its context ended, no engine has failed, and legEnded returns the cause of the context. A leg
// that failed before its context ended has failed: the failure of one concurrent leg also
// reaches the other leg through the engines.
func (a *attempt) legEnded(ctx context.Context, l *leg, err error) error {
	var f *failure
	failed := errors.As(err, &f)
	cause := context.Cause(ctx)
	switch {
	case failed && errors.Is(err, upstream.ErrUnwanted):
		f.err = a.noDecode()
		a.env.Journal.LegEnded(&l.Leg, "no_decode", f.err.Error())
		return f
	case ctx.Err() != nil && errors.Is(cause, errKVLate):
		f = l.failedBy(reasonKVLate, 504, errKVLate)
	case ctx.Err() != nil && (!failed || errors.Is(err, ctx.Err()) || errors.Is(err, cause)):
		text := cause.Error()
		if a.env.Client.Gone() {
			text = "the client left"
		}
		a.env.Journal.LegCancelled(&l.Leg, text)
		return cause
	case !failed: // the client's connection failed, not the engine
		a.env.Journal.LegEnded(&l.Leg, "client", err.Error())
		return err
	}
	e := a.classify(l, f)
	a.legFailed(l, e)
	return e
}

// noDecode returns the error of an attempt whose KV no decode engine can use any more.
func (a *attempt) noDecode() error {
	return &coordinator.NoTargetError{Phase: abi.Decode, Model: a.env.Ask.Model}
}

// legFailed counts a failed leg. The breaker of the engine, or the pair, counts the failure
// unless the request, the load, the proxy or the limit of the plan policy is at fault.
func (a *attempt) legFailed(l *leg, e *Error) {
	if downstream.OwnFault(e) || e.Moved {
		a.env.Journal.LegEnded(&l.Leg, e.Reason, e.cause())
		return
	}
	a.env.Journal.LegFailed(&l.Leg, e.Reason, e.cause())
	if e.Status == 0 && e.Unresponsive.IsZero() {
		e.Target.ProbeSoon()
	}
	switch {
	case e.exempt:
	case engine.IsRefused(e.err):
		e.Target.Refused()
	case e.Reply != nil || e.Permanent || e.Overloaded: // the engine works
		e.Target.Breaker.Success()
		if e.Overloaded {
			a.env.Registry.NoRoom(e.Target)
		}
	case e.Pair != nil:
		kind := e.Reason
		if e.Phase == abi.Prefill {
			kind = engine.Unmet
		}
		if e.Pair.Failure(kind) {
			a.env.Log.Warn("pair is broken", "prefill", e.Pair.Prefill.Name(), "prefill_rank", e.Pair.Prefill.Rank,
				"decode", e.Pair.Decode.Name(), "decode_rank", e.Pair.Decode.Rank, "reason", kind)
		}
		if !a.trial && (kind == reasonKVLate || kind == engine.Unmet) { // the engine of the leg may also hang by itself
			e.Target.Breaker.Failure()
		}
	default:
		e.Target.Breaker.Failure()
		if a.env.WarmUp && a.pair != nil && e.sent && e.Unresponsive.IsZero() { // SGLang's engines both report a failed transfer as their own
			a.pair.Failure(e.Reason)
		}
	}
}
