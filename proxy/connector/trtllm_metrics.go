package connector

import (
	"bytes"
	"math"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Timing is a TensorRT-LLM worker's timing of one request: four header lines of a whole
// answer, or the members of an event after the end of a stream, in the worker's text
// form. The zero Timing is empty.
//
// Source: TensorRT-LLM serve/perf_metrics.py.
type Timing struct {
	ServerTiming string // durations: server_queue;dur=1.25, server_ttft;dur=8.5, in ms
	StartEnd     string // times: server-start;ts=…, server-end;ts=…, in s
	Steps        string // durations of single steps of the engine
	Chunks       string // timing of the prompt's chunks
}

// Names of the header lines with timing, of the header line that requests them, and of
// the event with timing.
const (
	headerTiming        = "Server-Timing"
	headerStartEnd      = "X-Trtllm-Start-End-Time"
	headerSteps         = "X-Trtllm-Step-Metrics"
	headerChunks        = "X-Trtllm-Ctx-Chunk-Metrics"
	HeaderReturnMetrics = "X-Trtllm-Return-Metrics"
	eventTiming         = "trtllm.perf_metrics"
)

// MaxTiming is the maximum size of the lines in bytes, as workers limit it.
const MaxTiming = 80 << 10

// ClockPath is the path at which a worker accepts the offset of its steady clock
// (serve/openai_server.py, set_steady_clock_offset). If several front-end processes
// share a port, only one of them receives it.
func (trtllm) ClockPath() string { return "/steady_clock_offset" }

// finished adds to a leg the header line that requests timing, if that is configured.
func finished(a *Attempt, leg Leg) Leg {
	if a.TRTLLM.PerfMetrics {
		leg.Header = append(leg.Header, Field{Name: HeaderReturnMetrics, Value: "1"})
	}
	return leg
}

// lines returns t's lines in the order in which they are written.
func (t *Timing) lines() [4]struct {
	name  string
	value *string
} {
	return [4]struct {
		name  string
		value *string
	}{{headerTiming, &t.ServerTiming}, {headerStartEnd, &t.StartEnd}, {headerSteps, &t.Steps}, {headerChunks, &t.Chunks}}
}

// IsZero reports whether t is empty.
func (t *Timing) IsZero() bool { return *t == Timing{} }

// TimingHeader reports whether a line of an answer belongs to a Timing.
func TimingHeader(name string) bool {
	return strings.EqualFold(name, headerTiming) || strings.EqualFold(name, headerStartEnd) ||
		strings.EqualFold(name, headerSteps) || strings.EqualFold(name, headerChunks)
}

// ReadTiming reads the lines of an answer; get returns the value of one line.
func ReadTiming(get func(name string) string) (t Timing) {
	for _, l := range t.lines() {
		*l.value = get(l.name)
	}
	return t
}

// CutTiming removes the event with the timing from the end of a text of complete events.
func CutTiming(events []byte) (rest []byte, t Timing) {
	const begin = "event: " + eventTiming + "\n"
	at := bytes.LastIndex(events, literal(begin))
	if at < 0 || at > 0 && events[at-1] != '\n' {
		return events, Timing{}
	}
	data, ok := bytes.CutPrefix(events[at+len(begin):], literal("data: "))
	if !ok {
		return events, Timing{}
	}
	var o openai.Object
	if o.Parse(bytes.TrimSpace(data)) != nil {
		return events, Timing{}
	}
	for key, value := range o.Members {
		for _, l := range t.lines() {
			if strings.EqualFold(key, l.name) {
				*l.value, _ = openai.String(value)
			}
		}
	}
	return events[:at:at], t
}

// Header returns t as header lines.
func (t *Timing) Header() (fields []Field) {
	for _, l := range t.lines() {
		if *l.value != "" {
			fields = append(fields, Field{Name: l.name, Value: *l.value})
		}
	}
	return fields
}

// AppendEvent appends t as the event after the end of a stream, or nothing if t is
// empty.
func (t *Timing) AppendEvent(dst []byte) []byte {
	if t.IsZero() {
		return dst
	}
	dst = append(dst, "event: "+eventTiming+"\ndata: "...)
	next := byte('{')
	for _, l := range t.lines() {
		if *l.value != "" {
			dst = append(openai.AppendQuoted(append(dst, next), timingName(l.name)), ':')
			dst = openai.AppendQuoted(dst, *l.value)
			next = ','
		}
	}
	return append(dst, "}\n\n"...)
}

// timingName is a line's name in the form that workers use in the event.
func timingName(name string) string {
	if rest, ok := strings.CutPrefix(name, "X-Trtllm"); ok {
		return "X-TRTLLM" + rest
	}
	return name
}

// Join adds the timing of the worker of a phase to t under the phase's name, ctx or
// gen, as upstream's orchestrator does.
func (t *Timing) Join(phase string, worker Timing) {
	rename := strings.NewReplacer("server_", phase+"_", "server-", phase+"-")
	from := worker.lines()
	for i, l := range t.lines() {
		if value := *from[i].value; value != "" {
			if *l.value != "" {
				*l.value += ", "
			}
			*l.value += rename.Replace(value)
		}
	}
}

// AddDuration adds a duration in ms under a name such as disagg_ttft.
func (t *Timing) AddDuration(name string, ms float64) {
	if t.ServerTiming != "" {
		t.ServerTiming += ", "
	}
	t.ServerTiming += name + ";dur=" + strconv.FormatFloat(ms, 'f', 6, 64)
}

// Millis returns one of the worker's durations in ms: queue, ttft, e2e or kv_transfer.
func (t *Timing) Millis(name string) (ms float64, ok bool) {
	return number(t.ServerTiming, "server_"+name+";dur=")
}

// Moment returns one of the worker's times, start or end, in s on the worker's clock.
func (t *Timing) Moment(name string) (s float64, ok bool) {
	return number(t.StartEnd, "server-"+name+";ts=")
}

// number returns the number in the item of the list that begins with begin.
func number(list, begin string) (float64, bool) {
	for item := range strings.SplitSeq(list, ",") {
		if text, ok := strings.CutPrefix(strings.TrimSpace(item), begin); ok {
			x, err := strconv.ParseFloat(text, 64)
			return x, err == nil && !math.IsNaN(x) && !math.IsInf(x, 0)
		}
	}
	return 0, false
}
