package conformance

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/journal"
)

// TestTRTLLMPerfMetrics: operators see the engines' metrics of a request. A client that
// requests the metrics gets them as from one engine; other clients get none.
func TestTRTLLMPerfMetrics(t *testing.T) {
	for _, style := range trtllmStyles {
		t.Run(style, func(t *testing.T) {
			f := startFleet(t, style, fleetOptions{
				prefill: 1, decode: 1,
				engine: func(_ string, _ int, c *enginesim.Config) { c.TRTLLM.PerfMetrics = true },
				config: func(c *config.Config) { c.TRTLLM.PerfMetrics = true },
			})
			for _, stream := range []bool{false, true} {
				body := chat("how long does it take", 6, stream)
				quiet := f.post(context.Background(), f.url, chatPath, body, "X-Request-Id", "quiet")
				f.right(quiet, chatPath, body)
				if strings.Contains(quiet.body, "perf_metrics") || quiet.header.Get("Server-Timing") != "" || quiet.header.Get("X-Trtllm-Start-End-Time") != "" {
					t.Errorf("timing was sent without a request: %v %s", quiet.header, quiet.body)
				}
				asked := f.post(context.Background(), f.url, chatPath, body, "X-Trtllm-Return-Metrics", "1", "X-Request-Id", "asked")
				f.right(asked, chatPath, body)
				timing := asked.header.Get("Server-Timing")
				if stream {
					_, after, _ := strings.Cut(asked.body, "data: [DONE]\n\nevent: trtllm.perf_metrics\ndata: ")
					var lines map[string]string
					if err := json.Unmarshal([]byte(after), &lines); err != nil {
						t.Fatalf("text after the stream: %q, %v", after, err)
					}
					timing = lines["Server-Timing"]
				}
				for _, name := range []string{"disagg_queue;dur=", "disagg_ttft;dur=", "ctx_ttft;dur=", "gen_ttft;dur=", "gen_e2e;dur="} {
					if !strings.Contains(timing, name) {
						t.Errorf("stream %v: %s is missing in %q", stream, name, timing)
					}
				}
				if strings.Contains(timing, "server_") {
					t.Errorf("the timing has an unknown name: %q", timing)
				}
			}
			f.timed("asked")

			// With context first, prefill's answer may be the whole answer.
			whole := f.post(context.Background(), f.url, chatPath, `{"model":"sim","messages":[{"role":"user","content":"<eos1> at once"}]}`, "X-Trtllm-Return-Metrics", "1")
			if timing := whole.header.Get("Server-Timing"); whole.status != 200 || !strings.Contains(timing, "ctx_ttft;dur=") {
				t.Errorf("got status %d, timing %q", whole.status, timing)
			}
			f.settled()
		})
	}
}

// timed asserts that the legs of a request have the engines' own times, and
// that these lie within the request: the clocks are aligned.
func (f *fleet) timed(id string) {
	f.t.Helper()
	var e journal.Explanation
	f.eventually("the request is explained", func() bool {
		f.admin("/v1/explain/"+id, &e)
		return e.RequestID != ""
	})
	for _, l := range e.Legs {
		tm := l.Timing
		if tm == nil || tm.FirstTokenMS == nil || tm.TotalMS == nil || tm.StartMS == nil || tm.EndMS == nil {
			f.t.Errorf("%s leg: %+v", l.Phase, tm)
			continue
		}
		const slack = 2000 // the clocks were aligned over a busy network
		if *tm.StartMS < -slack || *tm.EndMS > e.DurationMS+slack || *tm.EndMS < *tm.StartMS {
			f.t.Errorf("%s leg ran from %v to %v ms of %v", l.Phase, *tm.StartMS, *tm.EndMS, e.DurationMS)
		}
	}
	var rows []journal.PerfRow
	f.admin("/perf_metrics", &rows)
	if last := rows[len(rows)-1]; last.CtxTiming == nil || last.GenTiming == nil {
		f.t.Errorf("perf row %+v", last)
	}
}

// TestTRTLLMMetricsAreOff: a client cannot make engines measure when the
// configuration does not allow it.
func TestTRTLLMMetricsAreOff(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorTRTLLM, fleetOptions{prefill: 1, decode: 1, engine: func(_ string, _ int, c *enginesim.Config) { c.TRTLLM.PerfMetrics = true }})
	for _, stream := range []bool{false, true} {
		body := chat("how long does it take", 6, stream)
		a := f.post(context.Background(), f.url, chatPath, body, "X-Trtllm-Return-Metrics", "1")
		f.right(a, chatPath, body)
		if strings.Contains(a.body, "perf_metrics") || a.header.Get("Server-Timing") != "" {
			t.Errorf("%v %s", a.header, a.body)
		}
	}
}
