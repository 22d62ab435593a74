package kvaware

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// prefills returns n idle prefill targets with blocks of 512 tokens, and two
// decode targets after them.
func prefills(n int) []abi.Candidate {
	var rows []abi.Candidate
	for i := range n + 2 {
		c := abi.Candidate{Roles: abi.RolePrefill, Group: 1, Instance: uint32(i + 1), BlockTokens: 512}
		if i >= n {
			c.Roles = abi.RoleDecode
		}
		rows = append(rows, c)
	}
	return rows
}

func place(t *testing.T, p Params, f *abi.PlaceFacts) abi.PlaceDecision {
	t.Helper()
	if f.Flow == abi.FlowNone {
		f.Flow = abi.FlowPrefillFirst
	}
	f.Fixed = -1
	d := p.Place(f)
	for random := range uint64(5) {
		f.Random = random
		if again := p.Place(f); again != d {
			t.Fatalf("%+v, and %+v at random", d, again)
		}
	}
	return d
}

// busy makes the targets of a prefill leg busy.
func busy(rows []abi.Candidate) {
	for i := range 4 {
		rows[i].Busy = 0.9
	}
}

func TestPrefill(t *testing.T) {
	for _, tt := range []struct {
		name   string
		prompt int64
		turn   int32
		change func(rows []abi.Candidate)
		params func(p *Params)
		want   int32
	}{
		{"a match", 10_240, 2, func(r []abi.Candidate) { r[1].BlocksGPU = 10 }, nil, 1},
		{"the longer of two matches", 10_240, 2, func(r []abi.Candidate) { r[1].BlocksGPU = 4; r[2].BlocksGPU = 16 }, nil, 2},
		{"a match is worth waiting for", 10_240, 2, func(r []abi.Candidate) {
			r[1].BlocksGPU, r[1].Queued = 16, 12_000
		}, nil, 1},
		{"but not without end", 10_240, 2, func(r []abi.Candidate) {
			r[1].BlocksGPU, r[1].Queued, r[0].Queued, r[2].Queued = 2, 900_000, 10, 0
			r[3].Queued = 10
		}, nil, 2},
		{"a longer queue is not worth it while targets have time", 10_240, 2, func(r []abi.Candidate) {
			r[1].BlocksGPU, r[1].Queued, r[0].Queued, r[3].Queued = 16, 60_000, 10, 10
		}, nil, 2},
		{"the same queue is, if targets are busy", 10_240, 2, func(r []abi.Candidate) {
			r[1].BlocksGPU, r[1].Queued, r[0].Queued, r[3].Queued = 16, 60_000, 10, 10
			busy(r)
		}, nil, 1},
		{"without weight and patience only its own time counts", 10_240, 2, func(r []abi.Candidate) {
			r[1].BlocksGPU, r[1].Queued, r[0].Queued, r[3].Queued = 16, 12_000, 10, 10
			busy(r)
		}, func(p *Params) { p.SavedWeight, p.Patience = 0, 0 }, 2},
		{"a copy of many is not waited for", 10_240, 2, func(r []abi.Candidate) {
			for i := range 4 {
				r[i].BlocksGPU, r[i].Queued = 16, 9000
			}
			r[1].Queued, r[2].Queued = 8000, 100
		}, nil, 2},
		{"a shared block is worth no patience", 10_240, 2, func(r []abi.Candidate) {
			r[1].BlocksGPU, r[1].Queued, r[0].Queued, r[3].Queued = 1, 600, 10, 10
		}, nil, 2},
		{"memory before disk", 10_240, 2, func(r []abi.Candidate) { r[1].BlocksDisk = 16; r[2].BlocksCPU = 16 }, nil, 2},
		{"a slow disk is worse than nothing", 10_240, 2, func(r []abi.Candidate) { r[1].BlocksDisk = 16; r[2].BlocksGPU = 1 },
			func(p *Params) { p.DiskMicros = 1000 }, 2},
		{"recent placements", 10_240, 1, func(r []abi.Candidate) {
			for i := range 4 {
				r[i].RecentTokens, r[i].RecentRequests = 90_000, 1
			}
			r[2].RecentTokens = 80_000
		}, nil, 2},
		{"a target twice as fast", 10_240, 1, func(r []abi.Candidate) {
			for i := range 4 {
				r[i].TokenMicros, r[i].Queued = 100, 5000
			}
			r[3].TokenMicros = 20
		}, nil, 3},
		{"a long prompt keeps away from where many come", 60_000, 1, func(r []abi.Candidate) {
			for i := range 4 {
				r[i].RecentTokens, r[i].RecentRequests = 90_000, 3
			}
			r[1].RecentRequests, r[1].Queued = 1, 5000
		}, nil, 1},
		{"nor where work is lacking because long prompts meet", 60_000, 1, func(r []abi.Candidate) {
			for i := range 4 {
				r[i].RecentTokens, r[i].RecentRequests, r[i].Queued = 100_000, 3, 10
			}
			r[1].RecentTokens, r[1].RecentRequests, r[1].Queued, r[2].Queued = 60_000, 1, 5000, 0
		}, nil, 2},
		{"but for a price of 0", 60_000, 1, func(r []abi.Candidate) {
			for i := range 4 {
				r[i].RecentTokens, r[i].RecentRequests, r[i].Queued = 100_000, 3, 10
			}
			r[1].RecentTokens, r[1].RecentRequests, r[1].Queued, r[2].Queued = 60_000, 1, 5000, 0
		}, func(p *Params) { p.EvenWeight = 0 }, 1},
		{"more so if targets are busy", 60_000, 1, func(r []abi.Candidate) {
			for i := range 4 {
				r[i].RecentTokens, r[i].RecentRequests = 90_000, 3
			}
			r[1].RecentRequests, r[1].Queued = 1, 120_000
			busy(r)
		}, nil, 1},
		{"than while they have time", 60_000, 1, func(r []abi.Candidate) {
			for i := range 4 {
				r[i].RecentTokens, r[i].RecentRequests, r[i].Queued = 90_000, 3, 10
			}
			r[1].RecentRequests, r[1].Queued, r[2].Queued = 1, 120_000, 0
		}, nil, 2},
		{"a short prompt does not pay the cost", 10_240, 1, func(r []abi.Candidate) {
			for i := range 4 {
				r[i].RecentTokens, r[i].RecentRequests, r[i].Queued = 90_000, 3, 10
			}
			r[1].RecentRequests, r[1].Queued, r[2].Queued = 1, 5000, 0
		}, nil, 2},
		{"memory in use", 10_240, 1, func(r []abi.Candidate) {
			for i := range 4 {
				r[i].Usage = 0.99
			}
			r[0].Usage = 0.95
		}, nil, 0},
		{"home, where no index has the conversation's blocks", 10_240, 3, func(r []abi.Candidate) {
			for i := range 4 {
				r[i].BlockTokens = 0
			}
			r[2].Home, r[2].Queued = abi.RolePrefill, 3000
		}, nil, 2},
		{"home among equals", 10_240, 3, func(r []abi.Candidate) { r[3].Home = abi.RoleBoth }, nil, 3},
		{"a trial under way is left alone", 10_240, 2, func(r []abi.Candidate) {
			r[1].BlocksGPU, r[1].Trial, r[1].Requests = 20, true, 1
			r[0].Queued, r[3].Queued = 9000, 9000
		}, nil, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := &abi.PlaceFacts{Request: abi.RequestFacts{PromptTokens: tt.prompt, Turn: tt.turn}, Candidates: prefills(4)}
			tt.change(f.Candidates)
			f.Candidates[5].Tokens = 1 // decode has only one choice
			p := Defaults()
			if tt.params != nil {
				tt.params(&p)
			}
			if d := place(t, p, f); d.Prefill != tt.want || d.Decode != 4 || !f.Scored {
				t.Errorf("got %+v, want prefill %d", d, tt.want)
			}
		})
	}
}

// TestSizes: once sizes are known and targets are busy, prompts without a match go to the place
// for their size, unless work or queues outweigh it.
func TestSizes(t *testing.T) {
	f := &abi.PlaceFacts{Candidates: prefills(8)}
	f.Candidates[9].Tokens = 1
	for i := range 8 {
		f.Candidates[i].RecentTokens, f.Candidates[i].RecentRequests, f.Candidates[i].Busy = 50_000, 10, 0.9 // 5,000 a request
	}
	p, last := Defaults(), int32(0)
	for _, prompt := range []int64{10, 5000, 20_000, 60_000, 500_000} {
		f.Request.PromptTokens = prompt
		pick := p.Place(&abi.PlaceFacts{Flow: abi.FlowPrefillFirst, Fixed: -1, Request: f.Request, Candidates: f.Candidates}).Prefill
		if pick < last {
			t.Errorf("%d tokens go to row %d, fewer to row %d", prompt, pick, last)
		}
		last = pick
	}
	if last < 6 {
		t.Errorf("the longest prompt was placed on row %d of 8", last)
	}
	for i := range 8 {
		f.Candidates[i].Queued = 100_000
	}
	f.Candidates[0].Queued = 0
	if d := place(t, p, f); d.Prefill != 0 {
		t.Errorf("a long prompt waits at row %d while row 0 is idle", d.Prefill)
	}
}

func TestDecode(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(a, b *abi.Candidate)
		want   int32
	}{
		{"fewer tokens", func(a, _ *abi.Candidate) { a.Tokens = 10 }, 5},
		{"a held prefix saves the transfer", func(a, b *abi.Candidate) { a.Tokens, a.BlocksGPU = 9000, 20 }, 4},
		{"within reason", func(a, b *abi.Candidate) { a.Tokens, a.BlocksGPU = 90_000, 20 }, 5},
		{"memory in use", func(a, b *abi.Candidate) { a.Usage, b.Tokens = 0.98, 20_000 }, 5},
		{"home among equals", func(_, b *abi.Candidate) { b.Home = abi.RoleDecode }, 5},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := &abi.PlaceFacts{Request: abi.RequestFacts{PromptTokens: 10_240}, Candidates: prefills(4)}
			f.Candidates[0].BlocksGPU = 20
			tt.change(&f.Candidates[4], &f.Candidates[5])
			if d := place(t, Defaults(), f); d != (abi.PlaceDecision{Prefill: 0, Decode: tt.want}) {
				t.Errorf("got %+v, want decode %d", d, tt.want)
			}
		})
	}
}

// TestAggregated: an aggregated leg considers cached prefixes and streams.
func TestAggregated(t *testing.T) {
	rows := []abi.Candidate{
		{Roles: abi.RoleBoth, Instance: 1, BlockTokens: 16, Tokens: 500_000},
		{Roles: abi.RoleBoth, Instance: 2, BlockTokens: 16, Tokens: 10_000},
		{Roles: abi.RoleBoth, Instance: 3, BlockTokens: 16, Tokens: 20_000, BlocksGPU: 60},
	}
	f := &abi.PlaceFacts{Flow: abi.FlowAggregated, Request: abi.RequestFacts{PromptTokens: 1000}, Candidates: rows}
	if d := place(t, Defaults(), f); d != (abi.PlaceDecision{Prefill: -1, Decode: 2}) {
		t.Errorf("place(Defaults(), f) = %+v", d)
	}
	rows[2].BlocksGPU = 0
	if d := place(t, Defaults(), f); d.Decode != 1 {
		t.Errorf("%+v without a match", d)
	}
}

// TestScores: scores are in seconds, and the chosen row has the lowest.
func TestScores(t *testing.T) {
	f := &abi.PlaceFacts{Request: abi.RequestFacts{PromptTokens: 10_000}, Candidates: prefills(2)}
	f.Candidates[0].Queued, f.Candidates[3].Tokens = 5000, 1
	d := place(t, Defaults(), f)
	if a, b := f.Candidates[0].Score, f.Candidates[1].Score; d.Prefill != 1 || a != 1.5 || b != 1 {
		t.Errorf("got %+v, scores %v and %v, want 1.5 and 1 (10,000 tokens of 100 µs, and 5,000 before)", d, a, b)
	}
}

// TestSharedBeginning: conversations that begin as many of the latest did take the targets in turn,
// those without the beginning first. A match that few conversations share is followed.
func TestSharedBeginning(t *testing.T) {
	for _, tt := range []struct {
		name     string
		shared   uint32 // of the latest 32 conversations
		sequence uint64
		change   func(r []abi.Candidate)
		want     int32
	}{
		{"a match of few conversations", 4, 0, nil, 2},
		{"of many: a target without it", 5, 1, nil, 1},
		{"in turn", 5, 3, nil, 3},
		{"the target in turn has it", 5, 2, func(r []abi.Candidate) { r[1].Queued, r[3].Queued = 0, 10 }, 1},
		{"two targets are enough for a sixth of the conversations", 5, 0, func(r []abi.Candidate) { r[3].BlocksGPU, r[2].Queued = 16, 10 }, 3},
		{"two targets are not enough for half of the conversations", 16, 0, func(r []abi.Candidate) { r[3].BlocksGPU = 16 }, 0},
		{"all targets have it", 1, 0, func(r []abi.Candidate) {
			for i := range 4 {
				r[i].BlocksGPU = 16
			}
		}, 0},
		{"a long queue is left out", 5, 1, func(r []abi.Candidate) { r[1].Queued = 400_000 }, 0},
		{"a short match is no reason", 5, 1, func(r []abi.Candidate) { r[2].BlocksGPU, r[1].Queued = 1, 100 }, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := &abi.PlaceFacts{Request: abi.RequestFacts{PromptTokens: 10_240, Turn: 1, Shared: tt.shared}, Sequence: tt.sequence, Candidates: prefills(4)}
			f.Candidates[2].BlocksGPU = 16
			f.Candidates[5].Tokens = 1
			if tt.change != nil {
				tt.change(f.Candidates)
			}
			if d := place(t, Defaults(), f); d.Prefill != tt.want || d.Decode != 4 {
				t.Errorf("got %+v, want prefill %d", d, tt.want)
			}
		})
	}
}

// TestHomeAmongHolders: if other targets have most of the prompt's beginning, too, a conversation
// stays at a longer queue of its home. A typical request has 100 tokens.
func TestHomeAmongHolders(t *testing.T) {
	for _, tt := range []struct {
		holders int
		queued  int64 // at the home
		want    int32
	}{{2, 1500, 2}, {2, 1800, 1}, {3, 1500, 2}, {3, 1800, 1}, {4, 1500, 2}, {4, 1800, 0}} {
		f := &abi.PlaceFacts{Request: abi.RequestFacts{PromptTokens: 10_240, Turn: 2}, Candidates: prefills(4)}
		for i := range f.Candidates[:4] {
			c := &f.Candidates[i]
			c.RecentTokens, c.RecentRequests = 1000, 10
			if i == 2 || i == 1 || i == 3 && tt.holders > 2 || i == 0 && tt.holders > 3 {
				c.BlocksGPU = 20
			}
		}
		f.Candidates[2].Home, f.Candidates[2].Queued = abi.RolePrefill, tt.queued
		f.Candidates[1].Queued, f.Candidates[3].Queued = 1, 2 // row 0 precedes row 1, and row 1 precedes row 3
		f.Candidates[5].Tokens = 1
		if d := place(t, Defaults(), f); d.Prefill != tt.want {
			t.Errorf("%d holders, %d tokens wait at the home: got prefill %d, want %d", tt.holders, tt.queued, d.Prefill, tt.want)
		}
	}
}
