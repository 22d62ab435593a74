package journal

import (
	"math"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
)

// maxKeptTiming limits the timing that an explanation keeps of a leg, in bytes.
const maxKeptTiming = 1 << 10

// timed notes the timing that the engine of a leg reports.
func (r *record) timed(row *Leg, t connector.Timing) {
	if t.IsZero() {
		return
	}
	r.mu.Lock()
	row.timing = t
	r.mu.Unlock()
}

// Timing returns the timing of the proxy and of the engines of the last legs, under the
// names that TensorRT-LLM uses.
func (j *Journal) Timing() connector.Timing { return j.rec.timing() }

func (r *record) timing() (all connector.Timing) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var prefill, decode *Leg
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

// keepTiming stores the part of the timing that an explanation shows.
func (l *Leg) keepTiming() {
	l.timing.Steps, l.timing.Chunks = "", ""
	if len(l.timing.ServerTiming)+len(l.timing.StartEnd) > maxKeptTiming {
		l.timing = connector.Timing{}
	}
}

// ExplainedTiming is an engine's report of the times of a leg: the time in the queue, the
// time to the first token, the total time, and the time for the KV. If the proxy has set
// the engine's clock, it also has the begin and the end of the leg at the engine, in ms
// since the request arrived.
type ExplainedTiming struct {
	QueueMS      *float64 `json:"queue_ms,omitempty"`
	FirstTokenMS *float64 `json:"ttft_ms,omitempty"`
	TotalMS      *float64 `json:"e2e_ms,omitempty"`
	TransferMS   *float64 `json:"kv_transfer_ms,omitempty"`
	StartMS      *float64 `json:"start_ms,omitempty"`
	EndMS        *float64 `json:"end_ms,omitempty"`
}

// explainTiming returns the timing of a leg; nil if there is none.
func (r *record) explainTiming(l *Leg) *ExplainedTiming {
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
		if !ok || math.Abs(since) > day { // that clock is not set
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
