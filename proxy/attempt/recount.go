package attempt

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// recounts reports whether the engine of the answer counts transferred KV as cached tokens, so
// that the number of prefill must replace its number.
func (a *attempt) recounts() bool {
	return a.p.Flow != abi.FlowAggregated && connector.CountsTransferred(a.conn) &&
		(a.p.Flow != abi.FlowPrefillFirst || a.prefill.handoff.Fallback == "") // decode itself computed the prompt
}

// cachedByPrefill returns how many tokens of the prompt were cached on prefill. It is 0 if prefill
// does not report the number, or does not answer in time: no cached token is known then.
func (a *attempt) cachedByPrefill() int64 {
	a.awaitNumbers()
	if a.both.runs() && !a.both.over || a.prefill.answer == nil {
		return 0
	}
	u, _ := openai.ParseUsage(a.prefill.answer.B)
	return max(0, u.Cached)
}
