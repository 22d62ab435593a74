package pairaware

import (
	"math/rand/v2"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/kvaware"
)

func fleet(p, d int) []abi.Candidate {
	var rows []abi.Candidate
	for i := range p + d {
		role := abi.RolePrefill
		if i >= p {
			role = abi.RoleDecode
		}
		rows = append(rows, abi.Candidate{Roles: role, Group: 1, Instance: uint32(i + 1), BlockTokens: 512})
	}
	return rows
}

func TestPairs(t *testing.T) {
	ready := func(p, d int32) abi.Pair { return abi.Pair{Prefill: p, Decode: d, State: abi.PairReady} }
	for _, tt := range []struct {
		name   string
		fixed  int32
		change func(f *abi.PlaceFacts)
		want   abi.PlaceDecision
	}{
		{"the ready one", -1, func(f *abi.PlaceFacts) { f.Pairs = []abi.Pair{ready(1, 3)} }, abi.PlaceDecision{Prefill: 1, Decode: 3}},
		{"unknown before warming", -1, func(f *abi.PlaceFacts) {
			for p := range int32(2) {
				f.Pairs = append(f.Pairs, abi.Pair{Prefill: p, Decode: 2, State: abi.PairWarming})
			}
			f.Candidates[0].Queued = 10
		}, abi.PlaceDecision{Prefill: 1, Decode: 3}},
		{"anything before broken", -1, func(f *abi.PlaceFacts) {
			for p := range int32(2) {
				f.Pairs = append(f.Pairs, abi.Pair{Prefill: p, Decode: 2, State: abi.PairBroken}, abi.Pair{Prefill: p, Decode: 3, State: abi.PairBroken})
			}
			f.Pairs[3].State = abi.PairWarming
			f.Candidates[1].Queued = 1_000_000
		}, abi.PlaceDecision{Prefill: 1, Decode: 3}},
		{"a fast link", -1, func(f *abi.PlaceFacts) {
			f.Pairs = []abi.Pair{ready(0, 2), ready(0, 3), ready(1, 2), ready(1, 3)}
			for i := range f.Pairs {
				f.Pairs[i].TransferMicros = 50
			}
			f.Pairs[2].TransferMicros = 1
		}, abi.PlaceDecision{Prefill: 1, Decode: 2}},
		{"saved prefill against the cost of the transfer", -1, func(f *abi.PlaceFacts) {
			f.Pairs = []abi.Pair{ready(0, 2), ready(0, 3), ready(1, 2), ready(1, 3)}
			f.Candidates[0].BlocksGPU, f.Candidates[3].BlocksGPU = 16, 4
		}, abi.PlaceDecision{Prefill: 0, Decode: 3}},
		{"an overfull decode", -1, func(f *abi.PlaceFacts) {
			f.Pairs = []abi.Pair{ready(0, 2), ready(1, 3)}
			f.Candidates[2].Usage = 1
		}, abi.PlaceDecision{Prefill: 1, Decode: 3}},
		{"the fixed row is kept", 0, func(f *abi.PlaceFacts) {
			f.Pairs = []abi.Pair{ready(1, 2), ready(0, 3)}
			f.Candidates[0].Queued = 1_000_000
		}, abi.PlaceDecision{Prefill: 0, Decode: 3}},
		{"groups", -1, func(f *abi.PlaceFacts) {
			f.Candidates[0].Group, f.Candidates[2].Group = 2, 2
			f.Candidates[3].Tokens = 1_000_000
		}, abi.PlaceDecision{Prefill: 0, Decode: 2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := &abi.PlaceFacts{Flow: abi.FlowPrefillFirst, Fixed: tt.fixed, Request: abi.RequestFacts{PromptTokens: 10_240}, Candidates: fleet(2, 2)}
			tt.change(f)
			p := Defaults()
			for random := range uint64(5) {
				f.Random = random
				if d := p.Place(f); d != tt.want {
					t.Fatalf("p.Place(f) = %+v, want %+v", d, tt.want)
				}
			}
		})
	}
}

// TestLabels: a pair of one zone and revision is better than another pair, within the
// costs of the labels. Targets without a label differ from all targets.
func TestLabels(t *testing.T) {
	a, b := abi.Detail{Zone: 1, Revision: 7}, abi.Detail{Zone: 2, Revision: 7}
	for _, tt := range []struct {
		name           string
		zone, revision float64
		fixed          int32
		change         func(f *abi.PlaceFacts)
		want           abi.PlaceDecision
	}{
		{"prefill and decode of one zone", 50_000, 0, -1, func(f *abi.PlaceFacts) { f.Candidates[1].Queued, f.Candidates[2].Tokens = 100, 100 }, abi.PlaceDecision{Prefill: 0, Decode: 2}},
		{"no cost, no preference", 0, 0, -1, func(f *abi.PlaceFacts) { f.Candidates[1].Queued, f.Candidates[2].Tokens = 100, 100 }, abi.PlaceDecision{Prefill: 0, Decode: 3}},
		{"the other prefill for the sake of the zone", 50_000, 0, -1, func(f *abi.PlaceFacts) { f.Candidates[1].Queued, f.Candidates[2].Usage = 100, 1 }, abi.PlaceDecision{Prefill: 1, Decode: 3}},
		{"work outweighs the zone", 50_000, 0, -1, func(f *abi.PlaceFacts) {
			f.Candidates[1].Queued, f.Candidates[2].Tokens = 10_000, 1_000_000
		}, abi.PlaceDecision{Prefill: 0, Decode: 3}},
		{"an engine of the zone died: the other zone serves", 1e9, 0, -1, func(f *abi.PlaceFacts) {
			f.Candidates, f.Details = f.Candidates[:3], f.Details[:3]
			f.Candidates[0].Roles, f.Candidates[0].Group = abi.RolePrefill, 2
		}, abi.PlaceDecision{Prefill: 1, Decode: 2}},
		{"a retry with the same prefill", 50_000, 0, 1, func(f *abi.PlaceFacts) { f.Candidates[3].Tokens = 100 }, abi.PlaceDecision{Prefill: 1, Decode: 3}},
		{"revisions of a rolling update", 0, 50_000, -1, func(f *abi.PlaceFacts) {
			f.Details[0].Revision, f.Details[3].Revision = 8, 8
			f.Candidates[1].Queued, f.Candidates[3].Tokens = 100, 100
		}, abi.PlaceDecision{Prefill: 0, Decode: 3}},
		{"the costs add up", 50_000, 20_000, -1, func(f *abi.PlaceFacts) {
			f.Details[0].Revision, f.Details[3].Revision = 8, 8 // a pair differs in its zone or in its revision
			f.Candidates[1].Queued, f.Candidates[2].Tokens = 100, 100
		}, abi.PlaceDecision{Prefill: 0, Decode: 2}},
		{"no label at either end", 50_000, 0, -1, func(f *abi.PlaceFacts) {
			f.Details[0], f.Details[2] = abi.Detail{}, abi.Detail{}
			f.Candidates[1].Queued, f.Candidates[3].Tokens = 100, 100
		}, abi.PlaceDecision{Prefill: 1, Decode: 3}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, listed := range []bool{false, true} { // pairs in the table, and those that are not
				f := &abi.PlaceFacts{
					Flow: abi.FlowPrefillFirst, Fixed: tt.fixed, Request: abi.RequestFacts{PromptTokens: 1000},
					Candidates: fleet(2, 2), Details: []abi.Detail{a, b, a, b},
				}
				tt.change(f)
				for i := int32(0); listed && i < 2; i++ {
					for j := int32(2); int(j) < len(f.Candidates); j++ {
						f.Pairs = append(f.Pairs, abi.Pair{Prefill: i, Decode: j, State: abi.PairReady})
					}
				}
				p := Defaults()
				for label, micros := range map[string]float64{"zone": tt.zone, "revision": tt.revision} {
					if err := p.Table().Set("label_micros."+label, micros); err != nil {
						t.Fatal(err)
					}
				}
				if d := p.Place(f); d != tt.want {
					t.Errorf("p.Place(f) = %+v, want %+v; listed %t", d, tt.want, listed)
				}
			}
		})
	}
}

// TestIsTheBest: on random tables the pair equals that of a search through all
// pairs, except where the limit on tried prefill rows excludes it.
func TestIsTheBest(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	p := Defaults()
	for range 2000 {
		f := &abi.PlaceFacts{
			Flow: abi.FlowConcurrent, Fixed: -1, Random: rnd.Uint64(), Request: abi.RequestFacts{PromptTokens: 1 + rnd.Int64N(50_000)},
			Candidates: fleet(1+rnd.IntN(tries), 1+rnd.IntN(20)),
		}
		zone := float64(rnd.IntN(2)) * 300_000
		if err := p.Table().Set("label_micros.zone", zone); err != nil {
			t.Fatal(err)
		}
		if zone > 0 {
			for range f.Candidates {
				f.Details = append(f.Details, abi.Detail{Zone: rnd.Uint32N(4)})
			}
		}
		f.Adapters = rnd.IntN(2) == 0
		rows := f.Candidates
		states := map[[2]int32]abi.Pair{}
		for i := range rows {
			c := &rows[i]
			c.Tokens, c.Queued, c.BlocksGPU, c.Usage = rnd.Int64N(100_000), rnd.Int64N(50_000), rnd.Uint32N(90), rnd.Float32()
			if f.Adapters {
				c.Adapter = abi.AdapterState(rnd.IntN(5))
			}
			for j := range rows {
				if c.Roles == abi.RolePrefill && rows[j].Roles == abi.RoleDecode && rnd.IntN(2) == 0 {
					pair := abi.Pair{Prefill: int32(i), Decode: int32(j), State: abi.PairState(rnd.IntN(4)), TransferMicros: rnd.Float32() * 9}
					f.Pairs = append(f.Pairs, pair)
					states[[2]int32{pair.Prefill, pair.Decode}] = pair
				}
			}
		}
		apart := func(f *abi.PlaceFacts, i, j int32) float64 {
			if len(f.Details) == 0 || f.Details[i].Zone != 0 && f.Details[i].Zone == f.Details[j].Zone {
				return 0
			}
			return zone
		}
		lora := func(s abi.AdapterState) float64 {
			if !f.Adapters {
				return 0
			}
			return [...]float64{1e6 * p.KV.LoRALoadSeconds, 0, 1e6 * p.KV.LoRALoadSeconds, 0.5e6 * p.KV.LoRAWaitSeconds, 1e6 * p.KV.LoRAWaitSeconds}[s]
		}
		d := p.Place(f)
		cost := func(i, j int32) float64 {
			pool := p.KV.Survey(f, abi.RolePrefill)
			p.KV.Prefill(f, abi.RolePrefill, &pool, 0)
			pair, micros := states[[2]int32{i, j}], p.KV.TransferMicros
			if pair.TransferMicros > 0 {
				micros = float64(pair.TransferMicros)
			}
			return float64(rows[i].Score)*1e6 + p.KV.Stream(&rows[j], p.KV.Pressure()) + micros*kvaware.Missing(&rows[j], f.Request.PromptTokens) + p.state(pair.State) + apart(f, i, j) + lora(rows[i].Adapter) + lora(rows[j].Adapter)
		}
		got := cost(d.Prefill, d.Decode)
		for i := range rows {
			for j := range rows {
				if rows[i].Roles == abi.RolePrefill && rows[j].Roles == abi.RoleDecode && cost(int32(i), int32(j)) < got*(1-1e-9)-1 {
					t.Fatalf("%+v costs %v µs, rows %d and %d only %v", d, got, i, j, cost(int32(i), int32(j)))
				}
			}
		}
	}
}
