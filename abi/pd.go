// Package abi is the contract between the proxy and its policies: the names,
// the facts that a policy is shown, and the shapes of its answers, as Go values
// and as the bytes that cross the border of a guest. It imports nothing of this
// module, holds no state, and compiles natively and for WebAssembly.
package abi

// Phase is one of the halves of a request's work on engines, or what comes before
// them.
type Phase uint8

// The phases. PhaseNone is the zero value and never placed; Encode, of images and
// sounds ahead of prefill, is not placed by policies.
const (
	PhaseNone Phase = iota
	Prefill
	Decode
	Encode
)

// String returns the phase as it stands in errors, metrics and explain.
func (p Phase) String() string {
	switch p {
	case Prefill:
		return "prefill"
	case Decode:
		return "decode"
	case Encode:
		return "encode"
	}
	return "none"
}

// Role is the set of phases that an instance serves.
type Role uint8

// The roles; RoleBoth also serves aggregated requests. RoleEncode is never that of
// a candidate.
const (
	RolePrefill Role = 1 << iota
	RoleDecode
	RoleEncode
	RoleBoth = RolePrefill | RoleDecode
)

// String returns the role as it stands in the configuration.
func (r Role) String() string {
	switch r {
	case RolePrefill:
		return "prefill"
	case RoleDecode:
		return "decode"
	case RoleBoth:
		return "both"
	case RoleEncode:
		return "encode"
	}
	return "none"
}

// ParseRole is the inverse of Role.String; ok is false for any other text.
func ParseRole(s string) (r Role, ok bool) {
	switch s {
	case "prefill":
		return RolePrefill, true
	case "decode":
		return RoleDecode, true
	case "both":
		return RoleBoth, true
	case "encode":
		return RoleEncode, true
	}
	return 0, false
}

// Flow is the order in which the legs of an exchange are sent.
type Flow uint8

// The flows. FlowReject is an answer of the plan policy only.
const (
	FlowNone         Flow = iota
	FlowAggregated        // one leg on an engine that serves both phases
	FlowPrefillFirst      // decode is shaped by prefill's answer
	FlowConcurrent        // both legs at once
	FlowDecodeFirst       // decode waits for prefill to find it
	FlowReject
)

// String returns the flow as it stands in metrics and explain.
func (f Flow) String() string {
	switch f {
	case FlowAggregated:
		return "aggregated"
	case FlowPrefillFirst:
		return "prefill_first"
	case FlowConcurrent:
		return "concurrent"
	case FlowDecodeFirst:
		return "decode_first"
	case FlowReject:
		return "reject"
	}
	return "none"
}

// PairState is what is known of the connection between one prefill and one
// decode target.
type PairState uint8

// The pair states, in the order of the gauge pdproxy_pair_state.
const (
	PairUnknown PairState = iota
	PairWarming
	PairReady
	PairBroken
)

// String returns the state as GET /v1/pairs shows it.
func (s PairState) String() string {
	return [...]string{"unknown", "warming", "ready", "broken"}[s&3]
}

// RequestFacts is what a policy may know of a request. Token counts are
// estimates (exact only for prompts sent as token ids). In a guest the texts lie
// in the frame: they are good during the call of the hook only.
type RequestFacts struct {
	PromptTokens int64
	MaxTokens    int64 // -1: the client set none
	N            int64 // choices asked for
	Stream       bool
	PairBroken   bool   // the request's form cannot be carried as two legs
	Model        string // as the engines name it; "" when not known
	Conversation string // key of the conversation; "" without NeedConversation or when there is none
	Prompt       string // the JSON of prompt or messages; "" without NeedPrompt
	Turn         int32  // of the conversation, from 1; 0: not known; needs NeedConversation
}

// PlanFacts is what the plan policy decides on: the request, how many targets
// could serve each phase of it now, and what one leg and two would cost.
type PlanFacts struct {
	Request        RequestFacts
	PrefillTargets int32 // targets of role prefill or both that have a decode partner
	DecodeTargets  int32 // targets of role decode or both that have a prefill partner
	BothTargets    int32 // targets that can serve an aggregated leg

	// The most prompt tokens that one target holds, and the fewest that wait for
	// their prefill at one, of those that take prefill and of those that take an
	// aggregated leg; need NeedBlocks.
	PrefillCached, BothCached int64
	PrefillQueued, BothQueued int64
	// Measured in µs, 0 while not known: prefill of one uncached token, by the
	// same two kinds of targets, and of two legs the transfer of one prompt token
	// and what they cost beside; need NeedBlocks.
	PrefillMicros, BothMicros      float32
	TransferMicros, HandoverMicros float32

	Notes []string // out: what the policy left for explain
}

// PlanDecision is the plan policy's answer. The order of two legs belongs to
// the connector, so the plan says only how many.
type PlanDecision uint8

// The plan decisions. PlanPass leaves the decision to the next plan policy.
const (
	PlanPass PlanDecision = iota
	PlanAggregate
	PlanDisaggregate
	PlanReject
)

// PlanAnswer is the plan decision with what may go along with it.
type PlanAnswer struct {
	Decision    PlanDecision
	Status      uint16 // HTTP status of a reject; 0: 503
	LimitMillis uint32 // limit of each attempt's time to first byte; 0: as configured
}

// Candidate is one target (instance and rank) offered to the place policy. Its
// layout in memory is that of a row of the place frame: see rows.go before
// moving a field.
type Candidate struct {
	Instance uint32 // stable number of the instance, never 0
	Rank     int32
	Group    uint32 // targets of two groups cannot be paired
	Roles    Role
	Trial    bool      // its circuit is half open: one request may try it
	Pair     PairState // with the fixed prefill target; PairUnknown without one
	Home     Role      // the phases of the conversation's last turn that were served here; needs NeedConversation
	Requests int32     // requests in flight through this proxy
	Score    float32   // out: the policy's, for explain; counts when PlaceFacts.Scored is set
	Tokens   int64     // tokens in flight: prompts being computed and streams being decoded
	Queued   int64     // of these, prompt tokens whose prefill has not been computed

	// The request's leading KV blocks that the target holds, each counted in its
	// fastest tier, so that the match is their sum; and the tokens of one block.
	// They need NeedBlocks, and are 0 for what no index knows.
	BlocksGPU, BlocksCPU, BlocksDisk, BlockTokens uint32

	Usage       float32 // share of its KV memory in use, as the engine says; 0: not known
	TokenMicros float32 // measured µs of prefill for one uncached token; 0: not known

	// What was placed here of late for its prompt to be computed, each placement
	// weighing less the longer it is ago (1/e after ten minutes): uncached prompt
	// tokens, and requests. Need NeedBlocks.
	RecentTokens, RecentRequests float32

	// Busy is about the share of the last minute that computing what was placed
	// here takes, as measured: more than 1 when more was placed than is computed
	// in a minute; 0: nothing was, or no speed is known. Needs NeedBlocks.
	Busy float32
	_    uint32
}

// Matched is how many prompt tokens the target holds in any tier.
func (c *Candidate) Matched() int64 {
	return int64(c.BlocksGPU+c.BlocksCPU+c.BlocksDisk) * int64(c.BlockTokens)
}

// Pair is one row of the pair table: what is known of the connection between
// two candidates.
type Pair struct {
	Prefill, Decode int32 // rows of PlaceFacts.Candidates
	State           PairState
	TransferMicros  float32 // measured µs to transfer one prompt token; 0: not known
}

// PlaceFacts is the snapshot that the place policy decides on. Candidates are
// healthy, of the right model and not excluded by an earlier attempt, unless
// nothing else is left. With one leg every candidate can take it. With two,
// every candidate of a phase has a partner for the other phase in its group on
// another instance, so that prefill may be chosen first and decode after it.
type PlaceFacts struct {
	Request    RequestFacts
	Flow       Flow  // of two legs that of the first candidate; only aggregated or not matters
	Fixed      int32 // index of a prefill candidate that stays, or -1
	Candidates []Candidate
	Pairs      []Pair // needs NeedPairs; a pair that is not listed is PairUnknown

	// Sequence counts the placements before this one whose candidates are drawn
	// from the same targets: those of one model and one shape of legs, and of
	// first turns or others where conversations are needed. Random is
	// drawn for this placement. With them a policy takes turns and draws without
	// a state of its own.
	Sequence, Random uint64

	Scored bool     // out: the policy wrote Candidate.Score into every row it weighed
	Notes  []string // out: what the policy left for explain
}

// PlaceDecision names rows of PlaceFacts.Candidates; -1 is none. An aggregated
// leg is placed by Decode alone.
type PlaceDecision struct {
	Prefill, Decode int32
}

// Allows reports whether a decision keeps the contract: the legs that the flow
// has, each on a row that may take it, the pair within a group and on two
// targets, the fixed prefill where it was.
func (f *PlaceFacts) Allows(d PlaceDecision) bool {
	rows := f.Candidates
	if d.Decode < 0 || int(d.Decode) >= len(rows) {
		return false
	}
	if f.Flow == FlowAggregated {
		return d.Prefill == -1
	}
	if d.Prefill < 0 || int(d.Prefill) >= len(rows) || d.Prefill == d.Decode {
		return false
	}
	p, q := &rows[d.Prefill], &rows[d.Decode]
	return p.Roles&RolePrefill != 0 && q.Roles&RoleDecode != 0 && p.Group == q.Group &&
		(f.Fixed < 0 || d.Prefill == f.Fixed)
}

// MintFacts is the raw material of a disagg id. (UnixMilli, Node, Worker,
// Counter) is unique for a deployment whose processes have lines (node and worker)
// of their own, or are granted ranges of them.
type MintFacts struct {
	UnixMilli int64  // counts on with the ids from when they were reserved: no clock
	Node      uint8  // 0 to 255
	Worker    uint8  // 0 to 63
	Counter   uint16 // 0 to 1023
}

// DisaggEpochMilli is the Unix time in milliseconds from which disagg ids count
// time: 2025-01-01T00:00:00Z. Their 39 bits of it last until 2042.
const DisaggEpochMilli int64 = 1735689600000

// The legal range of a disagg id, [MinDisaggID, MaxDisaggID). Source:
// TensorRT-LLM tensorrt_llm/llmapi/disagg_utils.py, which keeps the ids below
// for workers' own use; the other engines accept the range too.
const (
	MinDisaggID uint64 = 1 << 40
	MaxDisaggID uint64 = 1<<63 - 1
)
