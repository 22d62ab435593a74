package coordinator

import (
	"errors"
	"fmt"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// Errors of Place.
var (
	// ErrUnknownModel reports that no registered instance serves the model.
	ErrUnknownModel = errors.New("place request: unknown model")
	// ErrModelNeeded reports that the client named no model and the engines serve several.
	ErrModelNeeded = errors.New("place request: model needed: the engines serve several")
	// ErrRejected matches every *RejectedError in errors.Is.
	ErrRejected = errors.New("place request: rejected by the plan policy")
	// ErrNoTarget matches every *NoTargetError in errors.Is.
	ErrNoTarget = errors.New("place request: no target")
	// ErrNoID reports that all ids of this process's ranges have been issued and no further range
	// has arrived.
	ErrNoID = errors.New("place request: no disagg id is left")
)

// RejectedError reports that the plan policy refused a request that could be served.
type RejectedError struct {
	Status int // HTTP status from the policy, 400 to 599; 0: the policy set none
}

// Error implements error.
func (e *RejectedError) Error() string { return ErrRejected.Error() }

// Is makes every RejectedError an ErrRejected.
func (e *RejectedError) Is(target error) bool { return target == ErrRejected }

// HeldError reports that the plan policy holds the request. The caller asks again later.
type HeldError struct {
	Limit time.Duration // of the whole wait; 0: the policy set none
}

// Error implements error.
func (e *HeldError) Error() string { return "place request: held by the plan policy" }

// NoTargetError reports that no engine can take a phase of the request now.
type NoTargetError struct {
	Phase  abi.Phase // PhaseNone: no engine can take the whole request
	Model  string
	Asleep int // targets of the model that sleep
}

// Error implements error.
func (e *NoTargetError) Error() string {
	what := "no engine is ready to serve"
	if e.Phase != abi.PhaseNone {
		what = "no engine is ready for the " + e.Phase.String() + " of"
	}
	if e.Model == "" {
		what += " the request"
	} else {
		what = fmt.Sprintf("%s model %q", what, e.Model)
	}
	if e.Asleep > 0 {
		what += Sleeping(e.Asleep)
	}
	return what
}

// Sleeping returns the end of an error text for a model of which n targets sleep.
func Sleeping(n int) string { return fmt.Sprintf("; targets that sleep: %d", n) }

// Is makes every NoTargetError an ErrNoTarget.
func (e *NoTargetError) Is(target error) bool { return target == ErrNoTarget }
