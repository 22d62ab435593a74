package attempt

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
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
	Reserved     bool // the retry budget has reserved a retry for this failure
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
