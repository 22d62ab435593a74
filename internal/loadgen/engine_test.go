package loadgen

import (
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// The counts of a run are exactly those of the engine, with each API, and no time is shorter
// than the engine's work.
func TestCountsOfEngine(t *testing.T) {
	const prefillUs, decodeUs = 100, 3000
	for _, api := range []string{APIChat, APICompletions, APIResponses} {
		t.Run(api, func(t *testing.T) {
			e, err := enginesim.New(enginesim.Config{PrefillUsPerToken: prefillUs, DecodeUsPerToken: decodeUs})
			if err != nil {
				t.Fatal(err)
			}
			if err := e.Start(); err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			c := Config{
				URL: e.URL(), API: api, Requests: 12, Concurrency: 4, PromptWords: 40, Shared: 20, MaxTokens: 6, IgnoreEOS: true,
				Turns: 3, TurnWords: 5, Timeout: time.Minute, Seed: 1, Limits: Limits{Total: 60_000},
			}
			r, err := Run(t.Context(), c)
			if err != nil || r.Failed != 0 {
				t.Fatalf("%v, failures %v", err, r.Failures)
			}
			s := e.State()
			if int64(r.Requests) != s.Requests || int64(r.PromptTokens) != s.PromptTokens || int64(r.CachedTokens) != s.CachedTokens || int64(r.OutputTokens) != s.OutputTokens {
				t.Errorf("%d requests, %d, %d and %d tokens; the engine counts %+v", r.Requests, r.PromptTokens, r.CachedTokens, r.OutputTokens, s)
			}
			if r.Requests != 12 || r.OutputTokens != 72 || r.CachedTokens == 0 || r.Good != 12 {
				t.Errorf("%+v", r)
			}
			for _, q := range r.Samples {
				first := float64(q.Prompt-q.Cached) * prefillUs / 1000
				if q.First < first || q.Total < first+float64(q.Output-1)*decodeUs/1000 || q.ID == "" && api != APIResponses {
					t.Errorf("request %d is faster than the engine: %+v", q.Request, q)
				}
			}
		})
	}
}
