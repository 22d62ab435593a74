package trtllm

import (
	"encoding/json"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// Names of the metrics of one request (serve/perf_metrics.py).
const (
	HeaderReturnMetrics = "X-Trtllm-Return-Metrics"
	HeaderServerTiming  = "Server-Timing"
	HeaderStartEnd      = "X-TRTLLM-Start-End-Time"
	headerSteps         = "X-TRTLLM-Step-Metrics"
	EventMetrics        = "trtllm.perf_metrics"
)

// steadyClock is the worker's own clock: seconds since some moment, plus an
// offset that an orchestrator has set.
type steadyClock struct {
	epoch  time.Time
	offset atomic.Pointer[float64]
}

// raw returns t on the clock without the offset, aligned with it.
func (c *steadyClock) raw(t time.Time) float64 { return t.Sub(c.epoch).Seconds() + 1e5 }

func (c *steadyClock) aligned(t time.Time) float64 {
	if offset := c.offset.Load(); offset != nil {
		return c.raw(t) + *offset
	}
	return c.raw(t)
}

// clockRoutes answer GET and POST /steady_clock_offset.
func (t *TRTLLM) clockRoutes(mux *http.ServeMux) {
	mux.HandleFunc("GET /steady_clock_offset", func(w http.ResponseWriter, _ *http.Request) {
		received := t.clock.raw(time.Now())
		core.WriteJSON(w, http.StatusOK, core.Obj("receive_ts", received, "transmit_ts", t.clock.raw(time.Now())))
	})
	mux.HandleFunc("POST /steady_clock_offset", func(w http.ResponseWriter, r *http.Request) {
		var q struct{ Offset *float64 }
		if body, err := core.ReadBody(w, r); err != nil || json.Unmarshal(body, &q) != nil || q.Offset == nil {
			core.WriteJSON(w, http.StatusBadRequest, core.Obj("error", "offset is required"))
			return
		}
		t.clock.offset.Store(q.Offset)
	})
}

// trtTimes are the times of a request's first sequence.
type trtTimes struct{ arrival, first, last time.Time }

// timed records the times of a sequence's tokens.
func (t *TRTLLM) timed(s *core.Sequence, emit func(core.Token)) func(core.Token) {
	q := s.Req.Ext.(*TRTRequest)
	if s.Choice != 0 {
		return emit
	}
	q.times.arrival = time.Now()
	return func(tok core.Token) {
		q.times.last = time.Now()
		if q.times.first.IsZero() {
			q.times.first = q.times.last
		}
		emit(tok)
	}
}

// metricsOf returns the metrics of a request, or nil if the request did not ask for them.
func (t *TRTLLM) metricsOf(req *core.Request) core.Object {
	times := &req.Ext.(*TRTRequest).times
	if !t.cfg.PerfMetrics || req.Header.Get(HeaderReturnMetrics) != "1" || times.last.IsZero() {
		return nil
	}
	ms := func(end time.Time) float64 { return float64(end.Sub(times.arrival)) / 1e6 }
	return core.Obj(
		HeaderServerTiming, fmt.Sprintf("server_queue;dur=%.6f, server_ttft;dur=%.6f, server_e2e;dur=%.6f", 0.0, ms(times.first), ms(times.last)),
		HeaderStartEnd, fmt.Sprintf("server-start;ts=%.9f, server-end;ts=%.9f", t.clock.aligned(times.arrival), t.clock.aligned(times.last)),
		headerSteps, fmt.Sprintf("server-step-0-forward;dur=%.6f", ms(times.first)),
	)
}

// UnaryHeader implements measuringProtocol.
func (t *TRTLLM) UnaryHeader(req *core.Request, h http.Header) {
	for _, m := range t.metricsOf(req) {
		h.Set(m.Name, m.Value.(string))
	}
}

// AfterDone implements measuringProtocol: the metrics of a stream follow its
// [DONE].
func (t *TRTLLM) AfterDone(req *core.Request) []any {
	if m := t.metricsOf(req); m != nil {
		return []any{core.NamedEvent{Name: EventMetrics, Data: m}}
	}
	return nil
}
