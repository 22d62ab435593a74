package dynamocost

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// TestCost compares with numbers computed from the formula.
func TestCost(t *testing.T) {
	c := abi.Candidate{Requests: 3, Tokens: 1600, Queued: 320, BlocksGPU: 4, BlocksCPU: 4, BlocksDisk: 4, BlockTokens: 16}
	for _, tt := range []struct {
		name   string
		phase  abi.Role
		prompt int64
		change func(*Params)
		want   float64
	}{
		{"prefill", abi.RolePrefill, 320, nil, 20 + 20 - 4 - 3 - 1},
		{"all matches", abi.RolePrefill, 16, func(p *Params) { p.OverlapCredit = 99 }, 0},
		{"decode", abi.RoleDecode, 320, nil, 100 + 20},
		{"aggregated", abi.RoleBoth, 320, nil, 32 + 120},
		{"scaled", abi.RolePrefill, 320, func(p *Params) { p.PrefillLoadScale = 2 }, 64},
		{"requests count", abi.RoleDecode, 320, func(p *Params) { p.DecodeActiveRequest = 5 }, 135},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := Defaults()
			if tt.change != nil {
				tt.change(&p)
			}
			if got := p.cost(&c, tt.prompt, tt.phase); got != tt.want {
				t.Errorf("got %v blocks, want %v", got, tt.want)
			}
		})
	}
}

func TestPlace(t *testing.T) {
	rows := []abi.Candidate{
		{Roles: abi.RolePrefill, Group: 1, Instance: 1, Queued: 1000, BlocksGPU: 70, BlockTokens: 16},
		{Roles: abi.RolePrefill, Group: 1, Instance: 2, Queued: 0, BlocksGPU: 6, BlockTokens: 16},
		{Roles: abi.RoleDecode, Group: 1, Instance: 3, Tokens: 90, BlocksGPU: 90},
		{Roles: abi.RoleDecode, Group: 1, Instance: 4, Tokens: 80},
	}
	f := &abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1, Request: abi.RequestFacts{PromptTokens: 1600}, Candidates: rows}
	p := Defaults()
	if d := p.Place(f); d != (abi.PlaceDecision{Prefill: 0, Decode: 3}) {
		t.Errorf("p.Place(f) = %+v", d)
	}
	rows[0].Queued = 1030
	if d := p.Place(f); d.Prefill != 1 {
		t.Errorf("%+v though the queue outweighs the match", d)
	}
}
