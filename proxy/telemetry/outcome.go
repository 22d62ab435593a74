package telemetry

import "github.com/pdproxy/pdproxy/abi"

// Outcome is how an exchange ended: an abi.Outcome with its name in metrics, the label
// of pdproxy_exchanges_total.
type Outcome abi.Outcome

// The outcomes.
const (
	OutcomeNone        = Outcome(abi.OutcomeNone)
	OutcomeOK          = Outcome(abi.OutcomeOK)
	OutcomeClientError = Outcome(abi.OutcomeClientError)
	OutcomeEngineError = Outcome(abi.OutcomeEngineError)
	OutcomeTimeout     = Outcome(abi.OutcomeTimeout)
	OutcomeCancelled   = Outcome(abi.OutcomeCancelled)
	OutcomeBroken      = Outcome(abi.OutcomeBroken)
	OutcomeShed        = Outcome(abi.OutcomeShed)
	OutcomeNoTarget    = Outcome(abi.OutcomeNoTarget)
	OutcomeInternal    = Outcome(abi.OutcomeInternal)
)

// String returns the outcome's name in metrics and explain.
func (o Outcome) String() string {
	names := [...]string{
		OutcomeNone: "none", OutcomeOK: "ok", OutcomeClientError: "client_error", OutcomeEngineError: "engine_error",
		OutcomeTimeout: "timeout", OutcomeCancelled: "cancelled", OutcomeBroken: "broken", OutcomeShed: "shed",
		OutcomeNoTarget: "no_target", OutcomeInternal: "internal",
	}
	if int(o) < len(names) {
		return names[o]
	}
	return names[0]
}
