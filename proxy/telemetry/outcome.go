package telemetry

// Outcome is how an exchange ended: the label of pdproxy_exchanges_total.
type Outcome uint8

// The outcomes.
const (
	OutcomeNone        Outcome = iota // not ended yet
	OutcomeOK                         // the client has the whole answer
	OutcomeClientError                // 4xx: the request was at fault
	OutcomeEngineError                // a leg failed and no retry was left
	OutcomeTimeout                    // a leg timed out and no retry was left
	OutcomeCancelled                  // the client left
	OutcomeBroken                     // a stream ended in an error event
	OutcomeShed                       // refused by a limit
	OutcomeNoTarget                   // no engine could serve it
	OutcomeInternal                   // the proxy itself was at fault, or shut down
)

// String returns the outcome as it stands in metrics and explain.
func (o Outcome) String() string {
	names := [...]string{"none", "ok", "client_error", "engine_error", "timeout", "cancelled",
		"broken", "shed", "no_target", "internal"}
	if int(o) < len(names) {
		return names[o]
	}
	return names[0]
}
