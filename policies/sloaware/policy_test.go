package sloaware

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

const ms = 1000

// facts has prefill rows with the given waits and a second of work each, and two decode
// rows.
func facts(waits ...float32) *abi.PlaceFacts {
	f := &abi.PlaceFacts{Flow: abi.FlowPrefillFirst, Fixed: -1, Request: abi.RequestFacts{PromptTokens: 10_000}}
	for i, wait := range waits {
		f.Candidates = append(f.Candidates, abi.Candidate{Instance: uint32(1 + i), Group: 1, Roles: abi.RolePrefill, TokenMicros: 100, BlockTokens: 16})
		f.Predictions = append(f.Predictions, abi.Prediction{Prefill: wait + 1000*ms, Wait: wait, PrefillError: 10 * ms})
	}
	for i := range 2 {
		f.Candidates = append(f.Candidates, abi.Candidate{Instance: uint32(100 + i), Group: 1, Roles: abi.RoleDecode, Tokens: int64(i * 100), BlockTokens: 16})
		f.Predictions = append(f.Predictions, abi.Prediction{Start: 20 * ms, Token: 10 * ms})
	}
	return f
}

func TestPlace(t *testing.T) {
	p := Defaults() // targets of 4 s and 40 ms
	for name, tt := range map[string]struct {
		f               *abi.PlaceFacts
		change          func(f *abi.PlaceFacts)
		prefill, decode int32
	}{
		"the row with the match meets the target":     {facts(2000*ms, 0, 0), func(f *abi.PlaceFacts) { f.Candidates[0].BlocksGPU = 600 }, 0, 3},
		"the row with the match misses it":            {facts(3500*ms, 5000*ms, 0), func(f *abi.PlaceFacts) { f.Candidates[0].BlocksGPU = 600 }, 2, 3},
		"the start of the stream counts":              {facts(2900*ms, 0), func(f *abi.PlaceFacts) { f.Candidates[0].BlocksGPU = 600; f.Predictions[2].Start = 200 * ms }, 1, 2},
		"nothing in time: a further row may be late":  {facts(9000*ms, 3500*ms, 3200*ms), nil, 2, 4 - 1},
		"nothing in time: no further row may be late": {facts(9000*ms, 8000*ms, 3500*ms), func(f *abi.PlaceFacts) { f.Candidates[1].BlocksGPU = 200 }, 1, 3},
		"late, with less work than the mean request": {facts(9000*ms, 3500*ms, 3200*ms), func(f *abi.PlaceFacts) {
			f.Candidates[0].BlocksGPU, f.Candidates[1].RecentTokens, f.Candidates[1].RecentRequests = 500, 5000, 1
		}, 0, 3},
		"late, and no row is worth the additional work":           {facts(9000*ms, 3500*ms, 3200*ms), func(f *abi.PlaceFacts) { f.Candidates[0].BlocksGPU = 500 }, 0, 3},
		"in time on a row with requests, for four times the work": {facts(3500*ms, 2000*ms), func(f *abi.PlaceFacts) { f.Candidates[0].BlocksGPU = 500 }, 0, 2},
		"in time on a nearly idle row, for four times the work":   {facts(3500*ms, 50*ms), func(f *abi.PlaceFacts) { f.Candidates[0].BlocksGPU = 500 }, 1, 2},
		"in time for little additional work beside that of the mean request": {facts(3500*ms, 1500*ms), func(f *abi.PlaceFacts) {
			f.Candidates[0].BlocksGPU, f.Candidates[1].RecentTokens, f.Candidates[1].RecentRequests = 500, 180_000, 8
		}, 1, 2},
		"an unknown time: kv_aware":          {facts(9000*ms, 0), func(f *abi.PlaceFacts) { f.Predictions[1].Prefill = 0; f.Candidates[0].BlocksGPU = 600 }, 0, 2},
		"no predictions: kv_aware":           {facts(9000*ms, 0), func(f *abi.PlaceFacts) { f.Predictions = nil; f.Candidates[0].BlocksGPU = 600 }, 0, 2},
		"tokens that miss the target":        {facts(0), func(f *abi.PlaceFacts) { f.Predictions[1].Token = 90 * ms }, 0, 2},
		"no row meets the target for tokens": {facts(0), func(f *abi.PlaceFacts) { f.Predictions[1].Token, f.Predictions[2].Token = 60*ms, 50*ms }, 0, 1},
		"the request's limit for tokens":     {facts(0), func(f *abi.PlaceFacts) { f.Request.TokenMicros, f.Predictions[1].Token = 15*ms, 20*ms }, 0, 2},
		"the request allows slow tokens":     {facts(0), func(f *abi.PlaceFacts) { f.Request.TokenMicros, f.Predictions[1].Token = 100*ms, 90*ms }, 0, 1},
		"the request's deadline":             {facts(1500*ms, 0), func(f *abi.PlaceFacts) { f.Candidates[0].BlocksGPU, f.Request.Remaining = 600, 2000 }, 1, 2},
		"the deadline has passed: kv_aware":  {facts(1500*ms, 0), func(f *abi.PlaceFacts) { f.Candidates[0].BlocksGPU, f.Request.Remaining = 600, -5 }, 0, 2},
		"a fixed prefill":                    {facts(9000*ms, 0), func(f *abi.PlaceFacts) { f.Fixed = 0 }, 0, 2},
	} {
		if tt.change != nil {
			tt.change(tt.f)
		}
		if d := p.Place(tt.f); d != (abi.PlaceDecision{Prefill: tt.prefill, Decode: tt.decode}) || !tt.f.Scored {
			t.Errorf("%s: %+v, want %d and %d", name, d, tt.prefill, tt.decode)
		}
	}
	f := facts(9000*ms, 0)
	f.Flow, f.Candidates, f.Predictions = abi.FlowAggregated, f.Candidates[:2], f.Predictions[:2]
	f.Candidates[0].Roles, f.Candidates[1].Roles, f.Candidates[0].BlocksGPU = abi.RoleBoth, abi.RoleBoth, 600
	if d := p.Place(f); d != (abi.PlaceDecision{Prefill: -1, Decode: 1}) {
		t.Errorf("aggregated: %+v", d)
	}
}
