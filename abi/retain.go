package abi

// RetainFacts are the facts of a turn that has ended. Its decode engine retains the KV of the
// turn, so that prefill can pull the KV at the next turn of the conversation. The three Gaps
// describe earlier turns that ended like this one, with a call of a tool or without.
type RetainFacts struct {
	ToolCall   bool    // the answer ended with a call of a tool
	MostMillis uint32  // longest time for which the proxy may retain the KV
	Tokens     int64   // tokens whose KV is retained
	Usage      float32 // share of KV memory in use, as the decode engine reports; 0: not known

	Conversation Gaps // of this conversation; zero if the client did not name it
	Tools        Gaps // of the called tool with the longest gaps; zero without a tool
	All          Gaps // of all conversations
}

// Gaps are times between the end of a turn and the arrival of the next turn of its conversation.
// Earlier turns have smaller weights. The quantiles are those of the turns that came back, in ms.
type Gaps struct {
	Turns                   float32 // number of turns, weighted; 0: nothing is known
	Back                    float32 // share of them after which the next turn came within MostMillis
	P50, P75, P90, P95, P99 float32
}

// RetainDecision is the answer of the retain policy.
type RetainDecision struct {
	// Millis is the time for which the KV is retained; 0: the proxy frees it now. A time above
	// MostMillis means MostMillis.
	Millis uint32
	// Likelihood is the share of the full scale, 0 to 65535, of the chance that the next turn comes
	// while the KV is retained. If the memory of the engine is short, the proxy frees the least
	// likely KV first, and no KV with FullLikelihood.
	Likelihood uint16
}

// FullLikelihood is the likelihood of a turn that certainly comes.
const FullLikelihood = 1<<16 - 1

// Pack returns the decision as pdproxy_v1_on_retain returns it.
func (d RetainDecision) Pack() uint64 { return uint64(d.Millis) | uint64(d.Likelihood)<<32 }

// UnpackRetain is the inverse of RetainDecision.Pack. ok is false for a value with an
// undefined bit.
func UnpackRetain(v uint64) (d RetainDecision, ok bool) {
	if v>>48 != 0 {
		return RetainDecision{}, false
	}
	return RetainDecision{Millis: uint32(v), Likelihood: uint16(v >> 32)}, true
}

// Offsets of the facts of a retain frame, which has no request and is the same in both versions.
const (
	retainFlags        = 0
	retainMost         = 4
	retainTokens       = 8
	retainUsage        = 16
	retainConversation = 24
	retainTools        = retainConversation + gapsSize
	retainAll          = retainTools + gapsSize
	retainSize         = retainAll + gapsSize

	gapsTurns = 0
	gapsBack  = 4
	gapsP50   = 8
	gapsP75   = 12
	gapsP90   = 16
	gapsP95   = 20
	gapsP99   = 24
	gapsSize  = 32

	flagToolCall = 1 << 0
)

// RetainFrameSize is the size of a retain frame, the same in both versions.
const RetainFrameSize = HeaderSize + retainSize

// AppendRetain appends a frame of the retain hook.
func AppendRetain(dst []byte, h *Header, f *RetainFacts) []byte {
	w := begin(dst, HookRetain, h, retainSize, RetainFrameSize)
	if f.ToolCall {
		put32(w.facts, retainFlags, flagToolCall)
	}
	put32(w.facts, retainMost, f.MostMillis)
	put64(w.facts, retainTokens, uint64(f.Tokens))
	putFloat(w.facts, retainUsage, f.Usage)
	putGaps(w.facts[retainConversation:], &f.Conversation)
	putGaps(w.facts[retainTools:], &f.Tools)
	putGaps(w.facts[retainAll:], &f.All)
	return w.dst
}

func putGaps(b []byte, g *Gaps) {
	putFloat(b, gapsTurns, g.Turns)
	putFloat(b, gapsBack, g.Back)
	putFloat(b, gapsP50, g.P50)
	putFloat(b, gapsP75, g.P75)
	putFloat(b, gapsP90, g.P90)
	putFloat(b, gapsP95, g.P95)
	putFloat(b, gapsP99, g.P99)
}

// DecodeRetain reads a retain frame into f.
func DecodeRetain(b []byte, f *RetainFacts) (ok bool) {
	facts, ok := factsOf(b, HookRetain, retainSize)
	if !ok {
		return false
	}
	*f = RetainFacts{
		ToolCall: get32(facts, retainFlags)&flagToolCall != 0, MostMillis: get32(facts, retainMost),
		Tokens: int64(get64(facts, retainTokens)), Usage: getFloat(facts, retainUsage),
		Conversation: getGaps(facts[retainConversation:]), Tools: getGaps(facts[retainTools:]), All: getGaps(facts[retainAll:]),
	}
	return true
}

func getGaps(b []byte) Gaps {
	return Gaps{
		Turns: getFloat(b, gapsTurns), Back: getFloat(b, gapsBack),
		P50: getFloat(b, gapsP50), P75: getFloat(b, gapsP75), P90: getFloat(b, gapsP90), P95: getFloat(b, gapsP95), P99: getFloat(b, gapsP99),
	}
}
