package coordinator

import (
	"errors"
	"fmt"

	"github.com/pdproxy/pdproxy/abi"
)

// Errors of Place.
var (
	// ErrUnknownModel says that no instance is known to serve the model.
	ErrUnknownModel = errors.New("place request: unknown model")
	// ErrModelNeeded says that the client named no model and there are several.
	ErrModelNeeded = errors.New("place request: model needed: the engines serve several")
	// ErrRejected is what every *RejectedError is, for errors.Is.
	ErrRejected = errors.New("place request: rejected by the plan policy")
	// ErrNoTarget is what every *NoTargetError is, for errors.Is.
	ErrNoTarget = errors.New("place request: no target")
	// ErrNoID says that every id that this process was granted has been issued,
	// and that no further range has come.
	ErrNoID = errors.New("place request: no disagg id is left")
)

// RejectedError says that the plan policy refused the request though it could be
// served.
type RejectedError struct {
	Status int // HTTP status that the policy chose, 400 to 599; 0: it leaves it open
}

// Error implements error.
func (e *RejectedError) Error() string { return ErrRejected.Error() }

// Is makes every RejectedError an ErrRejected.
func (e *RejectedError) Is(target error) bool { return target == ErrRejected }

// NoTargetError says that no engine could be given a phase of the request now.
type NoTargetError struct {
	Phase abi.Phase // PhaseNone: no engine takes an aggregated request
	Model string
}

// Error implements error.
func (e *NoTargetError) Error() string {
	what := "no engine is ready to serve"
	if e.Phase != abi.PhaseNone {
		what = "no engine is ready for the " + e.Phase.String() + " of"
	}
	if e.Model == "" {
		return what + " the request"
	}
	return fmt.Sprintf("%s model %q", what, e.Model)
}

// Is makes every NoTargetError an ErrNoTarget.
func (e *NoTargetError) Is(target error) bool { return target == ErrNoTarget }
