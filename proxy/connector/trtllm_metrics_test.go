package connector

import (
	"bytes"
	"net/http"
	"strings"
	"testing"
)

// workerEvent is the event that a worker sends after a stream (build_metrics_sse_event).
const workerEvent = "event: trtllm.perf_metrics\ndata: " +
	`{"Server-Timing":"server_queue;dur=1.250000, server_ttft;dur=8.500000, server_e2e;dur=24.000000, server_kv_transfer;dur=0.5","X-TRTLLM-Start-End-Time":"server-start;ts=12345.123456789, server-end;ts=12345.147456789","X-TRTLLM-Step-Metrics":"server-step-0-forward;dur=2.1","X-TRTLLM-Ctx-Chunk-Metrics":"server-ctx-chunk-0-forward;dur=4.2"}` + "\n\n"

func TestCutTiming(t *testing.T) {
	const done = "data: [DONE]\n\n"
	for name, tt := range map[string]struct {
		events, rest string
		found        bool
	}{
		"alone":                {workerEvent, "", true},
		"behind the end":       {done + workerEvent, done, true},
		"none":                 {done, done, false},
		"not at an event":      {"data: event: trtllm.perf_metrics\ndata: {}\n\n", "data: event: trtllm.perf_metrics\ndata: {}\n\n", false},
		"of another form":      {"event: trtllm.perf_metrics\ndata: 5\n\n", "event: trtllm.perf_metrics\ndata: 5\n\n", false},
		"without data":         {"event: trtllm.perf_metrics\n\n", "event: trtllm.perf_metrics\n\n", false},
		"with nothing in it":   {"event: trtllm.perf_metrics\ndata: {}\n\n", "", false},
		"of members not known": {"event: trtllm.perf_metrics\ndata: {\"a\":\"b\",\"Server-Timing\":5}\n\n", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			rest, timing := CutTiming([]byte(tt.events))
			if string(rest) != tt.rest || timing.IsZero() == tt.found {
				t.Errorf("rest %q, timing %+v", rest, timing)
			}
		})
	}
}

// TestTiming reads, joins and writes timings.
func TestTiming(t *testing.T) {
	_, byEvent := CutTiming([]byte(workerEvent))
	h := http.Header{
		"Server-Timing": {byEvent.ServerTiming}, "X-Trtllm-Start-End-Time": {byEvent.StartEnd},
		"X-Trtllm-Step-Metrics": {byEvent.Steps}, "X-Trtllm-Ctx-Chunk-Metrics": {byEvent.Chunks},
	}
	if byHeader := ReadTiming(h.Get); byHeader != byEvent {
		t.Errorf("by header %+v, by event %+v", byHeader, byEvent)
	}
	for name := range h {
		if !TimingHeader(name) || !TimingHeader(strings.ToUpper(name)) {
			t.Errorf("TimingHeader(%s) = false", name)
		}
	}
	if string(byEvent.AppendEvent(nil)) != workerEvent {
		t.Errorf("AppendEvent\n%s\nwant\n%s", byEvent.AppendEvent(nil), workerEvent)
	}
	for name, want := range map[string]float64{"queue": 1.25, "ttft": 8.5, "e2e": 24, "kv_transfer": 0.5} {
		if ms, ok := byEvent.Millis(name); !ok || ms != want {
			t.Errorf("%s is %v, %v", name, ms, ok)
		}
	}
	if _, ok := byEvent.Millis("que"); ok {
		t.Error("a part of a name counts as the name")
	}
	if s, ok := byEvent.Moment("end"); !ok || s != 12345.147456789 {
		t.Errorf("end %v, %v", s, ok)
	}
	bad := Timing{ServerTiming: "server_queue;dur=NaN, server_ttft;dur=, server_e2e;dur=1e999"}
	for _, name := range []string{"queue", "ttft", "e2e"} {
		if ms, ok := bad.Millis(name); ok {
			t.Errorf("%s is %v", name, ms)
		}
	}
	var all Timing
	all.AddDuration("disagg_queue", 0.1)
	all.Join("ctx", Timing{ServerTiming: "server_ttft;dur=1", StartEnd: "server-start;ts=1"})
	all.Join("gen", Timing{ServerTiming: "server_ttft;dur=2"})
	if want := "disagg_queue;dur=0.100000, ctx_ttft;dur=1, gen_ttft;dur=2"; all.ServerTiming != want || all.StartEnd != "ctx-start;ts=1" {
		t.Errorf("joined %+v", all)
	}
	if fields := all.Header(); len(fields) != 2 || fields[0].Name != "Server-Timing" {
		t.Errorf("header %v", fields)
	}
	if none := (&Timing{}).AppendEvent(nil); none != nil {
		t.Errorf("AppendEvent of no timing = %q, want nil", none)
	}
}

// TestTimingIsAsked: every leg requests timing if it is configured.
func TestTimingIsAsked(t *testing.T) {
	for _, on := range []bool{false, true} {
		a := pair(t, "/v1/completions", `{"model":"m","prompt":"x"}`)
		a.TRTLLM.PerfMetrics = on
		var c trtllm
		for name, shape := range map[string]func() (Leg, error){
			"prefill": func() (Leg, error) { return c.Prefill(a, nil) }, "aggregated": func() (Leg, error) { return c.Aggregated(a, nil) },
			"decode": func() (Leg, error) {
				return c.Decode(a, &Handoff{Params: []byte(`{"ctx_request_id":1}`), Prompt: []byte(`[1]`)}, nil)
			},
			"decode, first": func() (Leg, error) { return generationFirst(a, nil), nil },
		} {
			leg, err := shape()
			asked := len(leg.Header) == 1 && leg.Header[0] == (Field{Name: "X-Trtllm-Return-Metrics", Value: "1"})
			if err != nil || asked != on {
				t.Errorf("%s: header %v, %v", name, leg.Header, err)
			}
		}
	}
}

func FuzzCutTiming(f *testing.F) {
	f.Add([]byte("data: [DONE]\n\n" + workerEvent))
	f.Add([]byte("event: trtllm.perf_metrics\ndata: {\"Server-Timing\":\"\\ud83d\"}\n\n"))
	f.Fuzz(func(t *testing.T, events []byte) {
		rest, timing := CutTiming(events)
		if !bytes.HasPrefix(events, rest) {
			t.Errorf("%q is not the beginning of %q", rest, events)
		}
		if _, again := CutTiming(timing.AppendEvent(nil)); again != timing {
			t.Errorf("timing %+v is read back as %+v", timing, again)
		}
	})
}
