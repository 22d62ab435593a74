package attempt

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// numbersPatience limits how long the proxy waits for the timings and the usage of prefill, if the
// client gets them and decode ends before prefill has answered.
const numbersPatience = time.Second

// cutTiming removes the engine's timing from the end of whole, the last events of a leg's
// stream, and records it.
func (a *attempt) cutTiming(l *leg, whole []byte) []byte {
	rest, t := connector.CutTiming(whole)
	a.env.Journal.LegTimed(&l.Leg, t)
	return rest
}

// asksTiming reports whether the client requests the timings, which the proxy has requested from the
// engines.
func (a *attempt) asksTiming() bool {
	return a.env.Client.Header().Get(connector.HeaderReturnMetrics) == "1"
}

// awaitNumbers waits until a concurrent prefill leg has ended and its timing and usage are known.
func (a *attempt) awaitNumbers() {
	if !a.concurrent || a.both.over {
		return
	}
	limit := time.NewTimer(numbersPatience)
	defer limit.Stop()
	select {
	case r := <-a.both.prefill:
		a.takePrefill(r)
	case <-limit.C:
	case <-a.env.Context.Done():
	}
}

// tellTiming removes the engine's timing lines from the header of the answer. If the client
// requests timings, tellTiming adds the timings of all legs.
func (a *attempt) tellTiming() {
	h := a.env.Client.AnswerHeader()
	for name := range h {
		if connector.TimingHeader(name) {
			h.Del(name)
		}
	}
	if !a.asksTiming() {
		return
	}
	a.awaitNumbers()
	t := a.env.Journal.Timing()
	for _, f := range t.Header() {
		h.Set(f.Name, f.Value)
	}
}

// timingEvent writes the timings after the end of a stream.
func (a *attempt) timingEvent() error {
	a.env.Client.Flush() // the answer itself must not wait for the timings
	a.awaitNumbers()
	t := a.env.Journal.Timing()
	return a.env.Client.Write(t.AppendEvent(nil))
}

// recounts reports whether the engine of the answer counts transferred KV as cached tokens, so
// that the number of prefill must replace its number.
func (a *attempt) recounts() bool {
	_, counts := a.conn.(connector.Recounter)
	return counts && a.p.Flow != abi.FlowAggregated &&
		(a.p.Flow != abi.FlowPrefillFirst || a.prefill.handoff.Fallback == "") // decode itself computed the prompt
}

// cachedByPrefill returns how many tokens of the prompt were cached on prefill. It is 0 if prefill
// does not report the number, or does not answer in time: no cached token is known then.
func (a *attempt) cachedByPrefill() int64 {
	if a.concurrent && !a.both.over {
		a.awaitNumbers()
		if !a.both.over {
			return 0
		}
	}
	if a.prefill.answer == nil {
		return 0
	}
	u, _ := openai.ParseUsage(a.prefill.answer.B)
	return max(0, u.Cached)
}
