package proxy

import (
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
	errPeerLeg  = errors.New("the other leg failed")
	errPanicked = errors.New("the proxy failed")
)

func errNotCarried(connector string, api openai.API) error {
	return &openai.Error{Status: 501, Type: "invalid_request_error", Code: "not_implemented",
		Message: fmt.Sprintf("%s is not carried by the %s protocol", api.Path(), connector)}
}

// legError is a failed leg. Its text names the phase and the engine and holds
// nothing of the bodies.
type legError struct {
	phase  abi.Phase
	target engine.Target
	reason string // label of pdproxy_leg_errors_total
	status int    // the engine's HTTP status, 0 when it gave none
	code   int    // what the client gets when nobody else can answer
	relay  bool   // the client gets the engine's own answer, a 4xx: status, body and the two lines
	body   []byte
	ctype  string
	// retryAfter is the engine's Retry-After, "" without one.
	retryAfter string
	sent       bool         // the request may have reached the engine
	final      bool         // the request is at fault, not the engine: no retry
	refused    bool         // the retry budget was asked, and is used up
	pair       *engine.Pair // set when only the pair explains it: decode answers, but not with this KV
	elapsed    time.Duration
	spared     bool          // it timed out by the plan policy's limit, or pulled KV from another, or was left: its engine's circuit has nothing to learn
	silent     engine.Target // it was left: who has fallen silent, itself or whose KV it needs
	granted    bool          // the retry budget has been asked, and has given
	judged     bool          // the leg hook has been asked for the verdict
	verdict    abi.LegDecision
	same       coordinator.Pair // of a retry on the same targets
	err        error
}

// Error implements error.
func (e *legError) Error() string {
	if e.err != nil {
		return fmt.Sprintf("%s leg on engine %s failed: %s: %v", e.phase, e.target.Name(), e.reason, e.err)
	}
	return fmt.Sprintf("%s leg on engine %s failed: %s", e.phase, e.target.Name(), e.reason)
}

// Unwrap returns the cause.
func (e *legError) Unwrap() error { return e.err }

// newLegError classifies what the upstream client returned.
func newLegError(phase abi.Phase, t engine.Target, err error) *legError {
	e := &legError{phase: phase, target: t, reason: "reset", code: 502, sent: true, err: err}
	var ue *upstream.Error
	if downstream.OwnFault(err) {
		e.reason, e.code, e.spared = publicError(err).Code, 503, true
		return e
	}
	if errors.As(err, &ue) {
		e.sent = ue.Sent
		if ue.Local {
			e.reason, e.code, e.spared = downstream.ErrOverloaded.Code, downstream.ErrOverloaded.Status, true
			e.err = fmt.Errorf("%w: %w", downstream.ErrOverloaded, err)
			return e
		}
		e.reason = ue.Op
		if ue.Timeout {
			e.reason, e.code = "timeout", 504
		}
	}
	if errors.Is(err, upstream.ErrEvicted) {
		e.reason, e.code, e.silent, e.spared = "silent", 504, t, true
	}
	return e
}

// public is what the client is told.
func (e *legError) public() *openai.Error {
	kind, code := "failed", "leg_failed"
	if e.code == 504 {
		kind, code = "timed out", "leg_timeout"
	}
	return &openai.Error{
		Status:  e.code,
		Type:    "upstream_error",
		Code:    code,
		Message: fmt.Sprintf("the %s leg on engine %q %s (%s)", e.phase, e.target.Name(), kind, e.reason),
	}
}

// rejectedError is the plan policy's refusal with the status that it chose.
func rejectedError(status int) *openai.Error {
	e := &openai.Error{Status: status, Type: "overloaded_error", Code: "rejected_by_policy", Message: "the plan policy rejected the request"}
	switch {
	case status == 0:
		e.Status = 503
	case status == 429:
		e.Type = "rate_limit_error"
	case status < 500:
		e.Type = "invalid_request_error"
	}
	return e
}

// publicError maps any error of an exchange to what the client is told.
func publicError(err error) *openai.Error {
	var (
		oe *openai.Error
		le *legError
		nt *coordinator.NoTargetError
		re *coordinator.RejectedError
	)
	switch {
	case errors.As(err, &oe):
		return oe
	case errors.As(err, &le):
		return le.public()
	case errors.As(err, &nt):
		return &openai.Error{Status: 503, Type: "overloaded_error", Code: "no_target", Message: nt.Error()}
	case errors.Is(err, coordinator.ErrNoID):
		return &openai.Error{Status: 503, Type: "overloaded_error", Code: "no_id", Message: "no disagg id is left for the request; the coordinator grants none"}
	case errors.Is(err, coordinator.ErrUnknownModel):
		return &openai.Error{Status: 404, Type: "invalid_request_error", Code: "model_not_found", Param: "model", Message: "the model does not exist or no engine serves it"}
	case errors.Is(err, coordinator.ErrModelNeeded):
		return &openai.Error{Status: 400, Type: "invalid_request_error", Code: "missing_field", Param: "model", Message: "model is needed: the engines serve more than one"}
	case errors.As(err, &re):
		return rejectedError(re.Status)
	case errors.Is(err, downstream.ErrDraining), errors.Is(err, context.Canceled):
		return downstream.Draining
	}
	return &openai.Error{Status: 500, Type: "internal_error", Code: "internal", Message: "internal error"}
}
