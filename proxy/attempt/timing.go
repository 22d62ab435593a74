package attempt

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
)

// timingPatience is how long an answer whose client asks for timings waits for
// prefill's, when decode is through before prefill has said that it is.
const timingPatience = time.Second

// timed reports whether the engines have been asked for the timing of their legs.
func (a *attempt) timed() bool {
	return a.c.TRTLLM.PerfMetrics && a.p.Decode.Spec.Connector == config.ConnectorTRTLLM
}

// cutTiming cuts the timing of a leg off the end of the last events of its stream.
func (a *attempt) cutTiming(l *leg, whole []byte) []byte {
	rest, t := connector.CutTiming(whole)
	a.env.Journal.LegTimed(l.Leg, t)
	return rest
}

// asksTiming reports whether the client wants to know how its request went, and
// the engines have been asked.
func (a *attempt) asksTiming() bool {
	return a.timed() && a.env.Client.Header().Get(connector.HeaderReturnMetrics) == "1"
}

// awaitTiming waits for prefill to say how it went, where both legs are under way.
func (a *attempt) awaitTiming() {
	if !a.both.runs() || a.both.over {
		return
	}
	limit := time.NewTimer(timingPatience)
	defer limit.Stop()
	select {
	case r := <-a.both.prefill:
		a.takePrefill(r)
	case <-limit.C:
	case <-a.env.Context.Done():
	}
}

// tellTiming takes the engine's lines out of the answer's header, and puts those
// of all legs in for a client that asks.
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
	a.awaitTiming()
	t := a.env.Journal.Timing()
	for _, f := range t.Header() {
		h.Set(f.Name, f.Value)
	}
}

// timingEvent writes the timings behind a stream's end for a client that asks.
func (a *attempt) timingEvent() error {
	if !a.asksTiming() {
		return nil
	}
	a.env.Client.Flush() // the answer itself waits for nothing
	a.awaitTiming()
	t := a.env.Journal.Timing()
	return a.env.Client.Write(t.AppendEvent(nil))
}
