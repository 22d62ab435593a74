package abi

// Hook is one of the decisions that a policy module can make.
type Hook uint16

// The hooks, in the order of an exchange.
const (
	HookNone Hook = iota
	HookPlan
	HookPlace
	HookMint
	HookLeg
	HookFinish
	HookRetain
	HookScore
	HookEvict

	// LastHook is the hook with the highest number.
	LastHook = HookEvict
)

// hookNames are the names of the hooks; their exports are prefix + "on_" + name.
var hookNames = [...]string{"none", "plan", "place", "mint", "leg", "finish", "retain", "score", "evict"}

// String returns the name of the hook in the list of policies, in metrics and
// in explain.
func (h Hook) String() string {
	if int(h) >= len(hookNames) {
		h = HookNone
	}
	return hookNames[h]
}

// ParseHook is the inverse of Hook.String; ok is false for any other text.
func ParseHook(s string) (h Hook, ok bool) {
	for i, name := range hookNames {
		if i > 0 && name == s {
			return Hook(i), true
		}
	}
	return HookNone, false
}

// Version is the version of the contract that this package describes. Version 2
// adds facts to version 1: the frames of a policy that declares none of them
// are those of version 1, byte for byte. Names of exports and foreign functions
// contain the version that introduced them.
const Version = 2

const prefix = "pdproxy_v1_"

// Export returns the name of the hook's export, such as pdproxy_v1_on_place.
func (h Hook) Export() string { return prefix + "on_" + h.String() }

// The other exports of a policy module.
const (
	ExportScratch  = prefix + "scratch"  // (size i32) -> ptr i32
	ExportPolicies = prefix + "policies" // () -> i64, optional
	ExportNeeds    = prefix + "needs"    // () -> i64, optional

	ExportPolicyNeeds = prefix + "policy_needs" // () -> i64, optional
	ExportHeaders     = prefix + "headers"      // () -> i64, optional
)

// Needs is a set of additional facts that a module requests. The proxy computes such a fact only
// when a module requests it.
type Needs uint64

// The needs.
const (
	NeedPrompt       Needs = 1 << iota // RequestFacts.Prompt
	NeedBlocks                         // Candidate.BlocksGPU to BlockTokens, Queued, Recent; costs in PlanFacts
	NeedConversation                   // RequestFacts.Conversation, Candidate.Home
	NeedRanks                          // a row for each rank; this proxy always gives them
	NeedPairs                          // PlaceFacts.Pairs
	NeedDetails                        // PlaceFacts.Details
	NeedIdentity                       // RequestFacts.Identity
	NeedPredictions                    // PlaceFacts.Predictions
	NeedTraits                         // RequestFacts.Traits
	NeedHeaders                        // RequestFacts.Headers
	NeedMedia                          // Candidate.Media, Candidate.MediaSent
)

// version2 are the needs that version 2 added.
const version2 = NeedDetails | NeedIdentity | NeedPredictions | NeedTraits | NeedHeaders

var needNames = [...]string{"prompt", "blocks", "conversation", "ranks", "pairs", "details", "identity", "predictions", "traits", "headers", "media"}

// Version returns the version of the frames for a policy with these needs: 2 if
// it needs a fact that version 2 added, otherwise 1.
func (n Needs) Version() uint16 {
	if n&version2 != 0 {
		return 2
	}
	return 1
}

// Names returns the needs as `pdproxy plugin inspect` shows them. It leaves out bits that this
// version does not define.
func (n Needs) Names() []string {
	var names []string
	for i, name := range needNames {
		if n&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return names
}

// The foreign functions (proxy_call_foreign_function) of policies and filters.
// README.md has their arguments and results. A host that lacks a function
// answers NOT_FOUND.
const (
	ForeignNote            = "pdproxy.v1.explain_note"
	ForeignCounter         = "pdproxy.v1.counter"
	ForeignConversationGet = "pdproxy.v1.conversation_get"
	ForeignConversationPut = "pdproxy.v1.conversation_put"
	ForeignPrefixMatch     = "pdproxy.v1.prefix_match"
)
