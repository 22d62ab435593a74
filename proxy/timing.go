package proxy

import (
	"math"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
)

// timingPatience is how long an answer whose client asks for timings waits for
// prefill's, when decode is through before prefill has said that it is.
const timingPatience = time.Second

// maxKeptTiming bounds what is kept for explain of a line with timings.
const maxKeptTiming = 1 << 10

// timed notes what the engine of a leg says of it.
func (r *record) timed(row *legRow, t connector.Timing) {
	if t.IsZero() {
		return
	}
	r.mu.Lock()
	row.timing = t
	r.mu.Unlock()
}

// cutTiming takes the timing off the end of a stream's events, which are whole
// and of which one has closed the stream.
func (a *attempt) cutTiming(whole []byte) []byte {
	rest, t := connector.CutTiming(whole)
	a.x.rec.timed(a.timing, t)
	return rest
}

// asksTiming reports whether the client wants to know how its request went, and
// the engines have been asked.
func (a *attempt) asksTiming() bool {
	return a.timed && a.x.client.Header().Get(connector.HeaderReturnMetrics) == "1"
}

// awaitTiming waits for prefill to say how it went, where both legs are under way.
func (a *attempt) awaitTiming() {
	if a.prefillOver == nil {
		return
	}
	limit := time.NewTimer(timingPatience)
	defer limit.Stop()
	select {
	case <-a.prefillOver:
	case <-limit.C:
	case <-a.x.ctx.Done():
	}
}

// tellTiming takes the engine's lines out of the answer's header, and puts those
// of all legs in for a client that asks.
func (a *attempt) tellTiming() {
	if !a.timed {
		return
	}
	h := a.x.client.AnswerHeader()
	for name := range h {
		if connector.TimingHeader(name) {
			h.Del(name)
		}
	}
	if !a.asksTiming() {
		return
	}
	a.awaitTiming()
	t := a.x.rec.timing()
	for _, f := range t.Header() {
		h.Set(f.Name, f.Value)
	}
}

// timingEvent writes the timings behind a stream's end for a client that asks.
func (a *attempt) timingEvent() error {
	if !a.asksTiming() {
		return nil
	}
	a.x.client.Flush() // the answer itself waits for nothing
	a.awaitTiming()
	t := a.x.rec.timing()
	return a.x.client.Write(t.AppendEvent(nil))
}

// timing joins what the proxy and the engines of the last legs say, under
// upstream's names.
func (r *record) timing() (all connector.Timing) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var prefill, decode *legRow
	first := time.Time{}
	for _, l := range r.rows[:r.legs] {
		if first.IsZero() || l.Start.Before(first) {
			first = l.Start
		}
		if l.Phase == abi.Prefill {
			prefill = l
		} else {
			decode = l
		}
	}
	if !first.IsZero() {
		all.AddDuration("disagg_queue", millis(first.Sub(r.Start)))
	}
	if !r.FirstByte.IsZero() {
		all.AddDuration("disagg_ttft", millis(r.FirstByte.Sub(r.Start)))
	}
	if prefill != nil {
		all.Join("ctx", prefill.timing)
	}
	if decode != nil {
		all.Join("gen", decode.timing)
	}
	return all
}

// keepTiming leaves of a row's timing what explain shows.
func (l *legRow) keepTiming() {
	l.timing.Steps, l.timing.Chunks = "", ""
	if len(l.timing.ServerTiming)+len(l.timing.StartEnd) > maxKeptTiming {
		l.timing = connector.Timing{}
	}
}

// ExplainedTiming is what an engine said of a leg: how long it waited there,
// until its first token, in all, and for its KV; and when it began and ended
// there, in ms since the request came, where the engine's clock has been set.
type ExplainedTiming struct {
	QueueMS      *float64 `json:"queue_ms,omitempty"`
	FirstTokenMS *float64 `json:"ttft_ms,omitempty"`
	TotalMS      *float64 `json:"e2e_ms,omitempty"`
	TransferMS   *float64 `json:"kv_transfer_ms,omitempty"`
	StartMS      *float64 `json:"start_ms,omitempty"`
	EndMS        *float64 `json:"end_ms,omitempty"`
}

// explainTiming is a row's timing; nil when there is none.
func (r *record) explainTiming(l *legRow) *ExplainedTiming {
	if l.timing.IsZero() {
		return nil
	}
	duration := func(name string) *float64 {
		if ms, ok := l.timing.Millis(name); ok {
			return &ms
		}
		return nil
	}
	moment := func(name string) *float64 {
		const day = 24 * 3600
		s, ok := l.timing.Moment(name)
		since := s - unix(r.Start)
		if !ok || math.Abs(since) > day { // nobody has set that clock
			return nil
		}
		ms := math.Round(since*1e6) / 1e3
		return &ms
	}
	return &ExplainedTiming{
		QueueMS: duration("queue"), FirstTokenMS: duration("ttft"), TotalMS: duration("e2e"), TransferMS: duration("kv_transfer"),
		StartMS: moment("start"), EndMS: moment("end"),
	}
}
