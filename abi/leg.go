package abi

// LegEvent is the moment at which the proxy calls the leg hook.
type LegEvent uint8

// The leg events.
const (
	LegSend   LegEvent = iota // the leg is ready but not sent yet
	LegFailed                 // the leg failed before the client's first byte
)

// LegFacts are the facts for the leg hook.
type LegFacts struct {
	Request  RequestFacts
	Event    LegEvent
	Phase    Phase // PhaseNone for an aggregated leg
	Flow     Flow
	Attempt  uint32 // of this phase, the first is 1
	Left     uint32 // attempts that retry.attempts still allows after this one
	Instance uint32 // the leg's target
	Rank     int32
	Partner  uint32 // instance of the other leg, 0 without one
	PartRank int32
	ID       uint64 // disagg id, 0 for an aggregated leg
	Engine   string // the instance's name

	// These fields describe a leg that failed:
	Status  uint32 // HTTP status of the engine's answer; 0: none
	Elapsed int64  // microseconds since it was sent
	Reason  string // as in pdproxy_leg_errors_total

	Notes []string // out: the policy's notes for explain
}

// LegDecision is the leg hook's answer. The meaning of a number depends on the
// event.
type LegDecision uint8

// The leg decisions.
const (
	LegPass LegDecision = 0 // LegSend: send the leg as it is; LegFailed: apply the built-in retry rule

	LegEdited LegDecision = 1 // LegSend: apply the edits first

	LegRetry      LegDecision = 1 // LegFailed: send the leg again to the same targets
	LegPlaceAgain LegDecision = 2 // LegFailed: call the place policy for other targets
	LegGiveUp     LegDecision = 3 // LegFailed: report the error to the client
)

// Outcome is the way in which an exchange ended, as in the label of
// pdproxy_exchanges_total.
type Outcome uint8

// The outcomes.
const (
	OutcomeNone        Outcome = iota
	OutcomeOK                  // the client has the whole answer
	OutcomeClientError         // 4xx: the request was at fault
	OutcomeEngineError         // a leg failed and no retry was left
	OutcomeTimeout             // a leg timed out and no retry was left
	OutcomeCancelled           // the client left
	OutcomeBroken              // a stream ended in an error event
	OutcomeShed                // rejected by a limit
	OutcomeNoTarget            // no engine could serve it
	OutcomeInternal            // the proxy itself was at fault, or shut down
)

// FinishFacts are the facts of an exchange that has ended, for the finish hook.
type FinishFacts struct {
	Request      RequestFacts
	Outcome      Outcome
	Flow         Flow
	Failed       Phase  // the phase whose leg failed; PhaseNone without one
	Status       uint32 // HTTP status that the client got; 0: none
	Prefill      uint32 // instance; 0 for an aggregated request
	PrefillRank  int32
	Decode       uint32 // instance; 0 when nothing was placed
	DecodeRank   int32
	ID           uint64 // disagg id of the last attempt; 0 without one
	Attempts     uint32 // legs that were sent, over both phases
	Placed       int64  // microseconds from the request's arrival to its placement
	FirstByte    int64  // ... to the client's first byte; -1: there was none
	Total        int64  // ... to the end
	PromptTokens int64  // as the engine counted them; -1: the engine did not report it
	CachedTokens int64  // of these found in the KV cache; -1: the engine did not report it
	OutputTokens int64  // -1: not known
	Reason       string // of the error; "" without one
}
