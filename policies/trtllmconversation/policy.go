// Package trtllmconversation is the built-in place policy trtllm_conversation:
// the rule of the router of TensorRT-LLM's trtllm-serve disaggregated with type
// conversation, for comparison. Source: ConversationRouter of
// tensorrt_llm/serve/router.py.
package trtllmconversation

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// Needs are the additional facts that the policy needs.
const Needs = abi.NeedConversation

// Place is the policy, a pure function of the facts that does not allocate. An
// index of -1 for a leg means that no candidate fits.
func Place(f *abi.PlaceFacts) abi.PlaceDecision {
	f.Scored, f.Scale = true, abi.LowWins
	if f.Flow == abi.FlowAggregated { // with two legs, the two scores have different units
		f.Scale |= abi.UnitTokens
	}
	return candidates.Legs(f, func(leg candidates.Leg, phase abi.Role) int32 {
		return candidates.Cheapest(f.Candidates, leg, f.Sequence, func(c *abi.Candidate) float64 {
			switch {
			case phase == abi.RoleDecode: // decode's router has the type load_balancing
				return float64(c.Requests)
			case c.Home&phase != 0:
				return -1
			}
			return float64(c.Tokens)
		})
	})
}
