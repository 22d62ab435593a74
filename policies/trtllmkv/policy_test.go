package trtllmkv

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// TestScore compares with numbers computed from the formula: the matched tokens
// divided by the tokens of all blocks of the prompt without its last token,
// minus the requests divided by 64.
func TestScore(t *testing.T) {
	row := func(instance uint32, role abi.Role, requests int32, blocks uint32) abi.Candidate {
		return abi.Candidate{Roles: role, Group: 1, Instance: instance, Requests: requests, BlocksGPU: blocks, BlockTokens: 32}
	}
	// 100 tokens: 99 of them in 4 blocks, 128 tokens.
	rows := []abi.Candidate{
		row(1, abi.RolePrefill, 0, 0),  // 0
		row(2, abi.RolePrefill, 15, 1), // 0.25 - 0.234
		row(3, abi.RolePrefill, 17, 1), // 0.25 - 0.266
		row(4, abi.RoleDecode, 3, 0),   // -0.047
		row(5, abi.RoleDecode, 40, 3),  // 0.75 - 0.625
	}
	f := &abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1, Request: abi.RequestFacts{PromptTokens: 100}, Candidates: rows}
	p := Defaults()
	if d := p.Place(f); d != (abi.PlaceDecision{Prefill: 1, Decode: 4}) {
		t.Errorf("p.Place(f) = %+v", d)
	}
	for i, want := range []float32{0, -0.015625, 0.015625, 0.046875, -0.125} {
		if rows[i].Score != want {
			t.Errorf("row %d: cost %v, want %v", i, rows[i].Score, want)
		}
	}
	rows[1].Requests = 16 // as good as row 0
	for sequence, want := range []int32{0, 1, 0} {
		f.Sequence = uint64(sequence)
		if d := p.Place(f); d.Prefill != want {
			t.Errorf("turn %d: %+v", sequence, d)
		}
	}
	p.MaxBatchSize = 1000
	if d := p.Place(f); d.Prefill != 1 {
		t.Errorf("with a larger batch: %+v", d)
	}
}

func TestShare(t *testing.T) {
	for prompt, want := range map[int64]float64{0: 32, 1: 32, 2: 1, 33: 1, 34: 0.5} {
		if got := share(&abi.Candidate{BlocksGPU: 1, BlockTokens: 32}, prompt); got != want {
			t.Errorf("share of one block in a prompt of %d tokens = %v, want %v", prompt, got, want)
		}
	}
	if got := share(&abi.Candidate{}, 100); got != 0 {
		t.Errorf("%v without an index", got)
	}
}
