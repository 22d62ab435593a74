package kvaware

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// TestAdapters: both legs go where the request's LoRA adapter runs, unless the queue there costs
// more than loading the adapter, and not where other adapters take all places, unless all other
// queues cost more than the wait.
func TestAdapters(t *testing.T) {
	const unknown, running, free, waiting, full = abi.AdapterUnknown, abi.AdapterRunning, abi.AdapterFree, abi.AdapterWaiting, abi.AdapterFull
	for _, tt := range []struct {
		name   string
		states [4]abi.AdapterState // of two prefill and two decode targets
		change func(r []abi.Candidate, p *Params)
		want   abi.PlaceDecision
	}{
		{"where it runs", [4]abi.AdapterState{free, running, free, running}, nil, abi.PlaceDecision{Prefill: 1, Decode: 3}},
		{"a short queue there", [4]abi.AdapterState{free, running, free, running}, func(r []abi.Candidate, _ *Params) {
			r[1].Queued, r[3].Tokens = 900, 20_000 // 0.09 s and 0.08 s
		}, abi.PlaceDecision{Prefill: 1, Decode: 3}},
		{"a long queue there", [4]abi.AdapterState{free, running, free, running}, func(r []abi.Candidate, _ *Params) {
			r[1].Queued, r[3].Tokens = 1100, 30_000
		}, abi.PlaceDecision{Prefill: 0, Decode: 2}},
		{"not where others take all places", [4]abi.AdapterState{free, full, free, full}, func(r []abi.Candidate, _ *Params) {
			r[0].Queued, r[2].Tokens = 10_000, 200_000
		}, abi.PlaceDecision{Prefill: 0, Decode: 2}},
		{"unless the queues are longer", [4]abi.AdapterState{free, full, free, full}, func(r []abi.Candidate, _ *Params) {
			r[0].Queued, r[2].Tokens = 22_000, 500_000
		}, abi.PlaceDecision{Prefill: 1, Decode: 3}},
		{"waiting is better than full", [4]abi.AdapterState{full, waiting, full, waiting}, nil, abi.PlaceDecision{Prefill: 1, Decode: 3}},
		{"no report is like a free place", [4]abi.AdapterState{unknown, free, unknown, free}, func(r []abi.Candidate, _ *Params) {
			r[1].Queued, r[3].Tokens = 1, 1
		}, abi.PlaceDecision{Prefill: 0, Decode: 2}},
		{"a cached prompt is worth loading the adapter", [4]abi.AdapterState{free, running, free, running}, func(r []abi.Candidate, _ *Params) {
			r[0].BlocksGPU, r[2].BlocksGPU = 20, 0
		}, abi.PlaceDecision{Prefill: 0, Decode: 3}},
		{"without costs", [4]abi.AdapterState{full, running, full, running}, func(r []abi.Candidate, p *Params) {
			p.LoRALoadSeconds, p.LoRAWaitSeconds = 0, 0
			r[1].Queued, r[3].Tokens = 1, 1
		}, abi.PlaceDecision{Prefill: 0, Decode: 2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f, p := &abi.PlaceFacts{Request: abi.RequestFacts{PromptTokens: 10_240}, Candidates: prefills(2), Adapters: true}, Defaults()
			for i := range f.Candidates {
				f.Candidates[i].Adapter = tt.states[i]
			}
			if tt.change != nil {
				tt.change(f.Candidates, &p)
			}
			if d := place(t, p, f); d != tt.want {
				t.Errorf("got %+v, want %+v", d, tt.want)
			}
		})
	}
}

// TestAdaptersAggregated: an aggregated leg goes where the adapter runs.
func TestAdaptersAggregated(t *testing.T) {
	f := &abi.PlaceFacts{Flow: abi.FlowAggregated, Request: abi.RequestFacts{PromptTokens: 100}, Adapters: true, Candidates: []abi.Candidate{
		{Roles: abi.RoleBoth, Instance: 1, BlockTokens: 16, Adapter: abi.AdapterFull},
		{Roles: abi.RoleBoth, Instance: 2, BlockTokens: 16, Adapter: abi.AdapterRunning, Tokens: 5000},
		{Roles: abi.RoleBoth, Instance: 3, BlockTokens: 16, Adapter: abi.AdapterFree},
	}}
	if d := place(t, Defaults(), f); d != (abi.PlaceDecision{Prefill: -1, Decode: 1}) {
		t.Errorf("got %+v", d)
	}
}

// TestLabels: decode prefers a target that shares the labels of prefill, by their costs. Labels
// without a cost do not count.
func TestLabels(t *testing.T) {
	rack := abi.LabelID("rack")
	in := func(zone, value uint32) abi.Detail {
		return abi.Detail{Zone: zone, Weight: 1, Labels: [abi.OtherLabels]abi.Label{{Name: rack, Value: value}}}
	}
	for _, tt := range []struct {
		name   string
		labels map[string]float64
		decode [2]abi.Detail // of the decode targets; prefill is in zone 1, rack 7
		tokens int64         // in flight on the second decode target, 4 µs each
		want   int32
	}{
		{"no cost", nil, [2]abi.Detail{in(2, 8), in(1, 7)}, 1, 2},
		{"the zone of prefill", map[string]float64{"zone": 1000}, [2]abi.Detail{in(2, 7), in(1, 8)}, 200, 3},
		{"at most its cost", map[string]float64{"zone": 1000}, [2]abi.Detail{in(2, 7), in(1, 8)}, 300, 2},
		{"any label", map[string]float64{"rack": 1000}, [2]abi.Detail{in(1, 8), in(2, 7)}, 200, 3},
		{"the costs add up", map[string]float64{"rack": 1000, "zone": 1000}, [2]abi.Detail{in(2, 8), in(1, 7)}, 400, 3},
		{"an engine without the label has no value", map[string]float64{"rack": 1000}, [2]abi.Detail{in(1, 0), in(2, 7)}, 200, 3},
		{"nor does it share one", map[string]float64{"hardware": 1000}, [2]abi.Detail{in(1, 7), in(1, 7)}, 1, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := Defaults()
			for label, micros := range tt.labels {
				if err := p.Table().Set("label_micros."+label, micros); err != nil {
					t.Fatal(err)
				}
			}
			f := &abi.PlaceFacts{Request: abi.RequestFacts{PromptTokens: 1000}, Candidates: prefills(1), Details: []abi.Detail{in(1, 7), tt.decode[0], tt.decode[1]}}
			f.Candidates[2].Tokens = tt.tokens
			if d := place(t, p, f); d != (abi.PlaceDecision{Prefill: 0, Decode: tt.want - 1}) {
				t.Errorf("got %+v, want decode %d", d, tt.want-1)
			}
		})
	}
}
