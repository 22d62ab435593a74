// Package abi is the contract between the proxy and its policies: the names,
// the facts that a policy receives, and the shapes of its answers, as Go values
// and as the bytes that cross the border of a guest. It imports no other
// package of this module, holds no state, and compiles natively and for
// WebAssembly.
//
// The decisions behind this package are in docs/design/placement.md.
package abi

// Phase is one step of a request's work on engines: encode, prefill or decode.
type Phase uint8

// The phases. PhaseNone is the zero value and never placed. Encode processes
// images and sounds before prefill; policies do not place it.
const (
	PhaseNone Phase = iota
	Prefill
	Decode
	Encode
)

// String returns the name of the phase in errors, metrics and explain.
func (p Phase) String() string {
	return [...]string{"none", "prefill", "decode", "encode"}[p&3]
}

// Role is the set of phases that an instance serves.
type Role uint8

// The roles. RoleBoth also serves aggregated requests. A candidate never has
// RoleEncode.
const (
	RolePrefill Role = 1 << iota
	RoleDecode
	RoleEncode
	RoleBoth = RolePrefill | RoleDecode
)

// String returns the name of the role in the configuration.
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
	FlowDecodeFirst       // decode is sent first and waits for prefill
	FlowReject
)

// String returns the name of the flow in metrics and explain.
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

// PairState is the state of the connection between one prefill and one decode
// target.
type PairState uint8

// The pair states, in the order of the gauge pdproxy_pair_state.
const (
	PairUnknown PairState = iota
	PairWarming
	PairReady
	PairBroken
)

// String returns the name of the state in GET /v1/pairs.
func (s PairState) String() string {
	return [...]string{"unknown", "warming", "ready", "broken"}[s&3]
}

// RequestFacts are the facts of a request that a policy may receive. Token
// counts are estimates (exact only for prompts sent as token ids). In a guest
// the texts lie in the frame: they are valid only during the call of the hook.
type RequestFacts struct {
	PromptTokens int64
	MaxTokens    int64 // -1: the client set none
	N            int64 // choices asked for
	Stream       bool
	PairBroken   bool   // the request's form does not work with two legs
	Model        string // as the engines name it; "" when not known
	Conversation string // key of the conversation; "" without NeedConversation or when there is none
	Prompt       string // the JSON of prompt or messages; "" without NeedPrompt
	Turn         int32  // of the conversation, from 1; 0: not known; needs NeedConversation

	// Shared is the number of the latest SharedOf conversations of the model that begin with the
	// part of the prompt that targets hold, such as a system prompt. The conversation that computed
	// this part first does not count. While fewer than SharedOf conversations have begun, Shared is
	// extrapolated from these. Shared is 0 if the request does not begin a conversation, on a
	// retry, and for a conversation that starts at the home of its parent. It needs NeedBlocks and
	// NeedConversation.
	Shared uint32

	Identity // of the client; needs NeedIdentity
	Traits   // needs NeedTraits

	// Headers are the headers that policies declare; needs NeedHeaders. In a decoded frame
	// the list has one entry for each name of the module; elsewhere only headers of the request.
	Headers []RequestHeader

	extended bool // the facts of version 2 are set: decoding a frame of version 1 resets them
}

// SharedOf is the number of conversations that RequestFacts.Shared is counted among.
const SharedOf = 32

// Identity is what the proxy knows about the sender of a request. The zero value
// is an unknown sender. The numbers are hashes of names, so that a policy compares a number
// with a text of its own configuration.
type Identity struct {
	Client uint64 // ClientID of the client's name, which is never its key
	Tenant uint32 // LabelID of the tenant's name
	Class  uint32 // LabelID of the name of the priority class; 0 also if no class is configured
}

// ClientID returns the number that frames have in place of the name of a client: the 64-bit
// FNV-1a hash of its bytes. It is 0 only for "".
func ClientID(name string) uint64 {
	if name == "" {
		return 0
	}
	id := uint64(14695981039346656037)
	for i := range len(name) {
		id = (id ^ uint64(name[i])) * 1099511628211
	}
	return max(id, 1)
}

// PlanFacts are the facts for the plan policy: the request, the number of
// targets that can serve each phase of it now, and the cost of one leg and of
// two.
type PlanFacts struct {
	Request        RequestFacts
	PrefillTargets int32 // targets of role prefill or both that have a decode partner
	DecodeTargets  int32 // targets of role decode or both that have a prefill partner
	BothTargets    int32 // targets that can serve an aggregated leg
	PlanCosts            // needs NeedBlocks

	Notes []string // out: the policy's notes for explain
}

// PlanCosts are the costs of one leg and of two. In a name, Prefill means the targets of
// a prefill leg and Both those of an aggregated leg. Cached is the largest number of the
// prompt's tokens that one target holds. Queued is the smallest number of tokens that
// wait for their prefill at one target.
type PlanCosts struct {
	PrefillCached, BothCached int64
	PrefillQueued, BothQueued int64
	// Measured times in µs; 0: not known. PrefillMicros and BothMicros are prefill
	// of one uncached token. TransferMicros is the transfer of one prompt token's
	// KV between two legs. HandoverMicros is the remaining
	// extra time of two legs.
	PrefillMicros, BothMicros      float32
	TransferMicros, HandoverMicros float32
}

// PlanDecision is the plan policy's answer. It contains only the number of legs, because the
// connector determines the order of two legs.
type PlanDecision uint8

// The plan decisions. PlanPass leaves the decision to the next plan policy.
const (
	PlanPass PlanDecision = iota
	PlanAggregate
	PlanDisaggregate
	PlanReject
	PlanHold // wait, and ask the plan policy again
)

// PlanAnswer is the plan decision with its optional values.
type PlanAnswer struct {
	Decision    PlanDecision
	Status      uint16 // HTTP status of a reject; 0: 503
	LimitMillis uint32 // limit of each attempt's time to first byte, or of the wait of PlanHold; 0: as configured
}

// Candidate is one target (instance and rank) offered to the place policy. Its
// layout in memory is that of a row of the place frame: read rows.go before you
// move a field.
type Candidate struct {
	Instance uint32 // stable number of the instance, never 0
	Rank     int32
	Group    uint32 // targets of two groups cannot be paired
	Roles    Role
	Trial    bool      // its circuit is half open: one request may test it
	Pair     PairState // with the fixed prefill target; PairUnknown without one
	Home     Role      // the phases of the conversation's last turn that were served here; needs NeedConversation
	Requests int32     // requests in flight through this proxy
	Score    float32   // out: the policy's score, for explain; valid when PlaceFacts.Scored is set
	Tokens   int64     // tokens in flight: prompts being computed and streams being decoded
	Queued   int64     // of these, prompt tokens whose prefill has not been computed

	// The request's leading KV blocks that the target holds, and the tokens of
	// one block. Each block counts in its fastest tier only, so the sum of the
	// three counts is the match. They need NeedBlocks, and are 0 when no index
	// knows the blocks.
	BlocksGPU, BlocksCPU, BlocksDisk, BlockTokens uint32

	Usage       float32 // share of its KV memory in use, as the engine reports; 0: not known
	TokenMicros float32 // measured µs of prefill for one uncached token; 0: not known

	// RecentTokens and RecentRequests are the uncached prompt tokens and the
	// requests of recent prefills that were placed here. The weight of a
	// placement decays with its age, to 1/e after ten minutes. They need
	// NeedBlocks.
	RecentTokens, RecentRequests float32

	// Busy estimates the share of the last minute that the target needs to
	// compute the prefills placed here, from measured speeds. It is more than 1
	// when a minute does not suffice, and 0 when nothing was placed or no speed
	// is known. It needs NeedBlocks.
	Busy float32

	Adapter AdapterState // of the request's LoRA adapter here

	// Media is the number of different images, sounds and videos of the request, at most 16. MediaSent
	// is how many of them this proxy lately sent to the target for the computation of a prompt. They
	// need NeedMedia.
	Media, MediaSent uint8

	_ uint8
}

// AdapterState is the state of a request's LoRA adapter at one target, by the last report of
// the target's engine.
type AdapterState uint8

// The adapter states. Only requests in work count: an engine without requests of an adapter may
// still have it in memory.
const (
	AdapterUnknown AdapterState = iota // the request has no adapter, or the engine reports none
	AdapterRunning                     // requests with the adapter run here
	AdapterFree                        // no request with it is here, and another adapter fits into the batch
	AdapterWaiting                     // requests with the adapter wait here until it fits into the batch
	AdapterFull                        // no request with it is here, and other adapters take all places of the batch
)

// String returns the name of the state in explain.
func (s AdapterState) String() string {
	if s > AdapterFull {
		s = AdapterUnknown
	}
	return [...]string{"unknown", "running", "free", "waiting", "full"}[s]
}

// ParseAdapterState is the inverse of AdapterState.String, and accepts "" for unknown. ok is
// false for any other text.
func ParseAdapterState(s string) (state AdapterState, ok bool) {
	if s == "" {
		return AdapterUnknown, true
	}
	for state = range AdapterFull + 1 {
		if state.String() == s {
			return state, true
		}
	}
	return AdapterUnknown, false
}

// Matched returns the number of prompt tokens that the target holds in any tier.
func (c *Candidate) Matched() int64 {
	return int64(c.BlocksGPU+c.BlocksCPU+c.BlocksDisk) * int64(c.BlockTokens)
}

// Pair is one row of the pair table: the state of the connection between two
// candidates.
type Pair struct {
	Prefill, Decode int32 // rows of PlaceFacts.Candidates
	State           PairState
	TransferMicros  float32 // measured µs to transfer one prompt token; 0: not known
}

// PlaceFacts is the snapshot for the place policy. Candidates are healthy,
// serve the right model and were not excluded by an earlier attempt; other
// targets are candidates only when no such target is left. With one leg every
// candidate can take it. With two legs, every candidate of a phase has a
// partner for the other phase in its group on another instance, so a policy may
// choose prefill first and decode after it.
type PlaceFacts struct {
	Request    RequestFacts
	Flow       Flow  // of two legs the flow of the first candidate; only aggregated or not matters
	Fixed      int32 // index of a prefill candidate that the policy must keep, or -1
	Candidates []Candidate
	Pairs      []Pair // needs NeedPairs; a pair that is not listed is PairUnknown

	// Adapters: the adapter state of at least one candidate is known.
	Adapters bool

	// Details has one entry for each candidate, in the same order. It is empty
	// without NeedDetails, and in frames of version 1.
	Details []Detail

	// Predictions has one entry for each candidate, in the same order. It is empty
	// without NeedPredictions, and in frames without the table.
	Predictions []Prediction

	// Sequence counts the earlier placements with candidates from the same
	// targets: the same model, shape of legs and allowed engines. Where conversations
	// are needed, first turns and later turns count separately. Random is drawn
	// for this placement. With these two a policy can take turns or draw
	// without state of its own.
	Sequence, Random uint64

	Scored bool        // out: the policy wrote Candidate.Score into every row that it considered
	Scale  Scale       // out: the meaning of the scores, for explain; valid when Scored is set
	Scores []LegScores // out: how the scores came about, if policy.place is "scores"; its memory is reused
	Notes  []string    // out: the policy's notes for explain
}

// PlaceDecision names rows of PlaceFacts.Candidates; -1 means none. An
// aggregated leg uses only Decode.
type PlaceDecision struct {
	Prefill, Decode int32
}

// Allows reports whether a decision keeps the contract. Each leg of the flow
// has a row that may take it. The rows of a pair are two targets of one group.
// A fixed prefill stays as it is.
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

// MintFacts are the numbers of which a disagg id is made. The tuple (UnixMilli,
// Node, Worker, Counter) is unique in a deployment whose processes each have
// their own node and worker numbers, or their own granted ranges of them.
type MintFacts struct {
	UnixMilli int64  // starts at the time of the reservation and advances with the ids; it is not a clock
	Node      uint8  // 0 to 255
	Worker    uint8  // 0 to 63
	Counter   uint16 // 0 to 1023
}

// DisaggEpochMilli is the Unix time in milliseconds from which disagg ids count
// time: 2025-01-01T00:00:00Z. The 39 bits of time in an id last until 2042.
const DisaggEpochMilli int64 = 1735689600000

// The legal range of a disagg id is [MinDisaggID, MaxDisaggID). Source:
// TensorRT-LLM tensorrt_llm/llmapi/disagg_utils.py, which reserves the lower
// ids for its workers. The other engines accept the range too.
const (
	MinDisaggID uint64 = 1 << 40
	MaxDisaggID uint64 = 1<<63 - 1
)
