package journal

import (
	"log/slog"
	"net/http"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// BenchmarkJournal measures the account of a streamed request with two legs, without spans, access
// log and filters.
func BenchmarkJournal(b *testing.B) {
	metrics := telemetry.New(prometheus.NewRegistry())
	books := NewBooks(metrics, nil, nil, slog.New(slog.DiscardHandler), nil)
	p, d := targetNamed("p0"), targetNamed("d0")
	placement := &coordinator.Placement{
		Flow: abi.FlowPrefillFirst, Prefill: p, Decode: d, ID: 1 << 50, Policy: "least_load", Matched: -1,
		Facts: abi.PlaceFacts{Candidates: make([]abi.Candidate, 2)}, Targets: []engine.Target{p, d},
	}
	req := &openai.Request{API: openai.Chat, Model: "llama", Stream: true}
	var j Journal
	var prefill, decode Leg
	b.ReportAllocs()
	for b.Loop() {
		one := *placement
		j.Open(books, b.Context(), http.Header{}, "r")
		j.Client = ""
		j.Meter = metrics.Model("llama")
		j.Stage(telemetry.StageWaitsPlace)
		j.Stage(telemetry.StageRuns)
		j.Described(req)
		j.Placed(&one, 10)
		j.BeginLeg(&prefill, abi.Prefill, p, 1, "leg")
		j.LegAnswered(&prefill, 200)
		j.LegSucceeded(&prefill, "vllm-nixl")
		j.BeginLeg(&decode, abi.Decode, d, 1, "leg")
		j.LegAnswered(&decode, 200)
		j.AnswerBegins(&decode)
		j.Status = 200
		j.Intervals.Observe(j.FirstByte.Sub(j.Start))
		j.Counted = 8
		j.Usage = openai.Usage{Prompt: 10, Completion: 8}
		j.LegSucceeded(&decode, "vllm-nixl")
		j.Outcome = telemetry.OutcomeOK
		j.End(HTTP{})
		j.Close()
	}
}
