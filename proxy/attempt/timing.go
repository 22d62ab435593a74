package attempt

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
)

// numbersPatience limits how long the proxy waits for the timings and the usage of prefill, if the
// client gets them and decode ends before prefill has answered.
const numbersPatience = time.Second

// timed reports whether the proxy requests from the engines the timing of their legs.
func (a *attempt) timed() bool {
	return a.c.TRTLLM.PerfMetrics && a.p.Decode.Spec.Connector == config.ConnectorTRTLLM
}

// cutTiming removes the engine's timing from the end of whole, the last events of a leg's
// stream, and records it.
func (a *attempt) cutTiming(l *leg, whole []byte) []byte {
	rest, t := connector.CutTiming(whole)
	a.env.Journal.LegTimed(l.Leg, t)
	return rest
}

// asksTiming reports whether the client requests the timings and the proxy has requested them from
// the engines.
func (a *attempt) asksTiming() bool {
	return a.timed() && a.env.Client.Header().Get(connector.HeaderReturnMetrics) == "1"
}

// awaitNumbers waits until a concurrent prefill leg has ended and its timing and usage are known.
func (a *attempt) awaitNumbers() {
	if !a.both.runs() || a.both.over {
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
	if !a.timed() {
		return
	}
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

// timingEvent writes the timings after the end of a stream, if the client requests them.
func (a *attempt) timingEvent() error {
	if !a.asksTiming() {
		return nil
	}
	a.env.Client.Flush() // the answer itself must not wait for the timings
	a.awaitNumbers()
	t := a.env.Journal.Timing()
	return a.env.Client.Write(t.AppendEvent(nil))
}
