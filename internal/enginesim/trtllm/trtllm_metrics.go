package enginesim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"
)

// Names of the metrics of one request (serve/perf_metrics.py).
const (
	headerReturnMetrics = "X-Trtllm-Return-Metrics"
	headerServerTiming  = "Server-Timing"
	headerStartEnd      = "X-TRTLLM-Start-End-Time"
	headerSteps         = "X-TRTLLM-Step-Metrics"
	eventMetrics        = "trtllm.perf_metrics"
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
func (t *trtllm) clockRoutes(mux *http.ServeMux) {
	mux.HandleFunc("GET /steady_clock_offset", func(w http.ResponseWriter, _ *http.Request) {
		received := t.clock.raw(time.Now())
		writeJSON(w, http.StatusOK, obj("receive_ts", received, "transmit_ts", t.clock.raw(time.Now())))
	})
	mux.HandleFunc("POST /steady_clock_offset", func(w http.ResponseWriter, r *http.Request) {
		var q struct{ Offset *float64 }
		if body, err := readBody(w, r); err != nil || json.Unmarshal(body, &q) != nil || q.Offset == nil {
			writeJSON(w, http.StatusBadRequest, obj("error", "offset is required"))
			return
		}
		t.clock.offset.Store(q.Offset)
	})
}

// trtTimes are the times of a request's first sequence.
type trtTimes struct{ arrival, first, last time.Time }

// timed records the times of a sequence's tokens.
func (t *trtllm) timed(s *sequence, emit func(token)) func(token) {
	q := s.req.Ext.(*trtRequest)
	if s.choice != 0 {
		return emit
	}
	q.times.arrival = time.Now()
	return func(tok token) {
		q.times.last = time.Now()
		if q.times.first.IsZero() {
			q.times.first = q.times.last
		}
		emit(tok)
	}
}

// metricsOf returns the metrics of a request, or nil if the request did not ask for them.
func (t *trtllm) metricsOf(req *request) object {
	times := &req.Ext.(*trtRequest).times
	if !t.cfg.PerfMetrics || req.Header.Get(headerReturnMetrics) != "1" || times.last.IsZero() {
		return nil
	}
	ms := func(end time.Time) float64 { return float64(end.Sub(times.arrival)) / 1e6 }
	return obj(
		headerServerTiming, fmt.Sprintf("server_queue;dur=%.6f, server_ttft;dur=%.6f, server_e2e;dur=%.6f", 0.0, ms(times.first), ms(times.last)),
		headerStartEnd, fmt.Sprintf("server-start;ts=%.9f, server-end;ts=%.9f", t.clock.aligned(times.arrival), t.clock.aligned(times.last)),
		headerSteps, fmt.Sprintf("server-step-0-forward;dur=%.6f", ms(times.first)),
	)
}

// unaryHeader implements measuringProtocol.
func (t *trtllm) unaryHeader(req *request, h http.Header) {
	for _, m := range t.metricsOf(req) {
		h.Set(m.name, m.value.(string))
	}
}

// afterDone implements measuringProtocol: the metrics of a stream follow its
// [DONE].
func (t *trtllm) afterDone(req *request) []any {
	if m := t.metricsOf(req); m != nil {
		return []any{namedEvent{eventMetrics, m}}
	}
	return nil
}
