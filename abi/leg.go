package abi

// LegEvent is the moment at which the leg hook is asked.
type LegEvent uint8

// The leg events.
const (
	LegSend   LegEvent = iota // the leg is shaped and not yet sent
	LegFailed                 // it failed before the client's first byte
)

// LegFacts is what the leg hook decides on.
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

	// Of a leg that failed:
	Status  uint32 // HTTP status that the engine answered; 0: none
	Elapsed int64  // microseconds since it was sent
	Reason  string // as in pdproxy_leg_errors_total

	Notes []string // out: what the policy left for explain
}

// LegDecision is the leg hook's answer; what a number means depends on the
// event.
type LegDecision uint8

// The leg decisions.
const (
	LegPass LegDecision = 0 // both events: send as it is; the built-in retry rule

	LegEdited LegDecision = 1 // LegSend: the edits are applied first

	LegRetry      LegDecision = 1 // LegFailed: send it again to the same targets
	LegPlaceAgain LegDecision = 2 // LegFailed: ask the place policy for other targets
	LegGiveUp     LegDecision = 3 // LegFailed: tell the client
)

// Outcome is how an exchange ended, as in the label of pdproxy_exchanges_total.
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
	OutcomeShed                // refused by a limit
	OutcomeNoTarget            // no engine could serve it
	OutcomeInternal            // the proxy itself was at fault, or shut down
)

// FinishFacts is what the finish hook learns of an exchange that has ended.
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
	PromptTokens int64  // as the engine counted them; -1: it did not tell
	CachedTokens int64  // of these found in the KV cache; -1: it did not tell
	OutputTokens int64  // -1: not known
	Reason       string // of the error; "" without one
}
