package guest

import (
	"slices"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

// The module under test is this package itself, compiled natively.
func init() {
	Plan("strict", func(f *abi.PlanFacts) abi.PlanAnswer {
		return abi.PlanAnswer{Decision: abi.PlanReject, Status: uint16(400 + f.BothTargets)}
	})
	Place("last", func(f *abi.PlaceFacts) abi.PlaceDecision {
		return abi.PlaceDecision{Prefill: -1, Decode: int32(len(f.Candidates)) - 1}
	}, abi.NeedConversation)
	Place("scored", func(f *abi.PlaceFacts) abi.PlaceDecision {
		for i := range f.Candidates {
			f.Candidates[i].Score = float32(i) + 0.5
		}
		f.Scored, f.Scale = true, abi.HighWins|abi.UnitTokens
		return abi.PlaceDecision{Prefill: f.Fixed, Decode: int32(f.Sequence)}
	})
	Mint("fixed", func(f *abi.MintFacts) uint64 { return abi.MinDisaggID + uint64(f.Counter) })
	Leg("edits", func(f *abi.LegFacts, e *abi.Edits) abi.LegDecision {
		if f.Event == abi.LegFailed {
			return abi.LegGiveUp
		}
		e.SetHeader("x-attempt", "1")
		return abi.LegEdited
	})
	Finish("counts", func(f *abi.FinishFacts) { finished = append(finished, f.OutputTokens) }, abi.NeedBlocks, abi.NeedPairs)
	Retain("tools", func(f *abi.RetainFacts) abi.RetainDecision {
		return abi.RetainDecision{Millis: f.MostMillis, Likelihood: uint16(f.Tools.P90)}
	})
	Score("rows", func(f *abi.ScoreFacts, to *abi.Scores) {
		to.Unit = abi.UnitBlocks
		for i, open := range f.Open {
			if open {
				to.Rows[i] = abi.RowScore{Score: float32(i) / 4, Value: float32(i)}
			}
		}
	}, abi.NeedTraits)
	Evict("last", func(f *abi.EvictFacts) int32 { return int32(len(f.Running)) - 1 })
	Score("not first", func(f *abi.ScoreFacts, to *abi.Scores) { to.Remove(0) })
	Need(abi.NeedPrompt)
	Need(abi.NeedPairs)
	OnConfigure(func(text string) bool { return text != "bad" })
}

var finished []int64

func TestList(t *testing.T) {
	want := "plan strict\nplace last\nplace scored\nmint fixed\nleg edits\nfinish counts\nretain tools\nscore rows\nscore not first\nevict last\n"
	if got := list(); got != want {
		t.Errorf("policies %q, want %q", got, want)
	}
	if got, want := listNeeds(), "place last 4\nfinish counts 18\nscore rows 256\n"; got != want {
		t.Errorf("needs of policies %q, want %q", got, want)
	}
	if needs != abi.NeedPrompt|abi.NeedPairs {
		t.Errorf("needs %b", needs)
	}
}

func TestConfigured(t *testing.T) {
	if Configured("bad") || !Configured("good") || Config() != "good" {
		t.Errorf("configuration %q", Config())
	}
}

func TestPlan(t *testing.T) {
	frame := abi.AppendPlan(nil, &abi.Header{}, &abi.PlanFacts{BothTargets: 29})
	if a, ok := abi.UnpackPlan(onPlan(frame)); !ok || a != (abi.PlanAnswer{Decision: abi.PlanReject, Status: 429}) {
		t.Errorf("answer %+v, %v", a, ok)
	}
}

func TestPlace(t *testing.T) {
	f := &abi.PlaceFacts{Fixed: 1, Sequence: 2, Candidates: make([]abi.Candidate, 3)}
	frame := abi.AppendPlace(nil, &abi.Header{}, f)
	if d := abi.UnpackPlace(onPlace(frame)); d != (abi.PlaceDecision{Prefill: -1, Decode: 2}) {
		t.Errorf("policy 0: %+v", d)
	}
	if abi.ReadScores(frame, &abi.Header{}, f); f.Scored {
		t.Error("policy 0 gave scores")
	}
	frame = abi.AppendPlace(nil, &abi.Header{Policy: 1}, f)
	if d := abi.UnpackPlace(onPlace(frame)); d != (abi.PlaceDecision{Prefill: 1, Decode: 2}) {
		t.Errorf("policy 1: %+v", d)
	}
	if abi.ReadScores(frame, &abi.Header{}, f); !f.Scored || f.Scale != abi.HighWins|abi.UnitTokens || f.Candidates[2].Score != 2.5 {
		t.Errorf("policy 1: scores %v %#x %+v", f.Scored, f.Scale, f.Candidates)
	}
}

func TestMintRetainAndFinish(t *testing.T) {
	if id := onMint(abi.AppendMint(nil, &abi.Header{}, &abi.MintFacts{Counter: 9})); id != abi.MinDisaggID+9 {
		t.Errorf("id %d", id)
	}
	want := abi.RetainDecision{Millis: 50, Likelihood: 7}
	if d, ok := abi.UnpackRetain(onRetain(abi.AppendRetain(nil, &abi.Header{}, &abi.RetainFacts{MostMillis: 50, Tools: abi.Gaps{P90: 7}}))); d != want || !ok {
		t.Errorf("decision %+v, want %+v", d, want)
	}
	finished = nil
	onFinish(abi.AppendFinish(nil, &abi.Header{}, &abi.FinishFacts{OutputTokens: 77}))
	if len(finished) != 1 || finished[0] != 77 {
		t.Errorf("finished %v", finished)
	}
}

func TestLeg(t *testing.T) {
	scratch := make([]byte, 1024)
	frame := abi.AppendLeg(scratch[:0], &abi.Header{}, &abi.LegFacts{Event: abi.LegSend})
	if d := onLeg(frame, scratch[len(frame):]); d != uint64(abi.LegEdited) {
		t.Fatalf("decision %d", d)
	}
	at, size := abi.EditsOf(frame)
	e, rest, ok := abi.NextEdit(scratch[at : at+size])
	if want := (abi.Edit{Op: abi.EditSetHeader, Name: "x-attempt", Value: "1"}); e != want || !ok || len(rest) != 0 {
		t.Errorf("edit %+v, %v, %d bytes after it", e, ok, len(rest))
	}
	if d := onLeg(frame, nil); d != uint64(abi.LegPass) {
		t.Errorf("decision %d without room for the edit", d)
	}
	failed := abi.AppendLeg(nil, &abi.Header{}, &abi.LegFacts{Event: abi.LegFailed})
	if d := onLeg(failed, nil); d != uint64(abi.LegGiveUp) {
		t.Errorf("decision %d after a failure", d)
	}
}

// TestScore: the scorers of a frame run in its order, and a row that one of them removes is closed for
// the next ones.
func TestScore(t *testing.T) {
	f := &abi.ScoreFacts{PlaceFacts: &abi.PlaceFacts{Fixed: -1, Candidates: make([]abi.Candidate, 3)}, Phases: abi.RolePrefill, Prefill: -1, Open: []bool{true, true, false}}
	frame := abi.AppendScore(nil, &abi.Header{}, f, []uint32{0, 1, 0})
	if answer := onScore(frame); answer != abi.ScoreDone {
		t.Fatalf("answer %d", answer)
	}
	rows, units := make([]abi.RowScore, 9), make([]abi.Scale, 3)
	abi.ReadRowScores(frame, f, rows, units)
	want := []abi.RowScore{{}, {Score: 0.25, Value: 1}, {}, {Score: abi.Removed}, {}, {}, {}, {Score: 0.25, Value: 1}, {}}
	if !slices.Equal(rows, want) || !slices.Equal(units, []abi.Scale{abi.UnitBlocks, 0, abi.UnitBlocks}) {
		t.Errorf("scores %v with %v", rows, units)
	}
	if n := testing.AllocsPerRun(10, func() { onScore(frame) }); n != 0 {
		t.Errorf("got %v allocations", n)
	}
	for name, wrong := range map[string][]byte{
		"another hook": abi.AppendMint(nil, &abi.Header{}, &abi.MintFacts{}), "no such scorer": abi.AppendScore(nil, &abi.Header{}, f, []uint32{2}),
	} {
		if answer := onScore(wrong); answer != 0 {
			t.Errorf("%s: answer %d", name, answer)
		}
	}
}

// TestEvict: the answer names a row of the frame, or none.
func TestEvict(t *testing.T) {
	for _, running := range []int{0, 1, 3} {
		f := &abi.EvictFacts{Running: make([]abi.Evictable, running)}
		row, ok := abi.UnpackEvict(onEvict(abi.AppendEvict(nil, &abi.Header{}, f)), f)
		if row != int32(running)-1 || !ok {
			t.Errorf("%d running: row %d, %v", running, row, ok)
		}
	}
}

// TestForeignFrames: a frame that is not of the hook, or whose policy does not
// exist, gets the answer that decides nothing.
func TestForeignFrames(t *testing.T) {
	mint := abi.AppendMint(nil, &abi.Header{}, &abi.MintFacts{})
	absent := abi.AppendPlace(nil, &abi.Header{Policy: 2}, &abi.PlaceFacts{Fixed: -1})
	for name, got := range map[string]uint64{
		"plan": onPlan(mint), "place": onPlace(mint) ^ none, "leg": onLeg(mint, nil), "mint": onMint(absent),
		"retain": ^onRetain(mint), "evict": ^onEvict(mint), "absent policy": onPlace(absent) ^ none, "empty": onPlan(nil), "cut off": onMint(mint[:70]),
	} {
		if got != 0 {
			t.Errorf("%s: %#x", name, got)
		}
	}
	onFinish(mint)
}

// TestHeaders: policies find the declared headers by their names.
func TestHeaders(t *testing.T) {
	defer func(names []string, all policies[func(*abi.PlanFacts) abi.PlanAnswer]) { headers, plans = names, all }(headers, plans)
	headers, plans = nil, policies[func(*abi.PlanFacts) abi.PlanAnswer]{}
	Headers("X-Tier", "x-region")
	Plan("tier", func(f *abi.PlanFacts) abi.PlanAnswer {
		if tier, _ := f.Request.Header("x-tier"); tier == "gold" {
			return abi.PlanAnswer{Decision: abi.PlanDisaggregate}
		}
		if _, ok := f.Request.Header("x-region"); ok {
			return abi.PlanAnswer{Decision: abi.PlanReject}
		}
		return abi.PlanAnswer{Decision: abi.PlanAggregate}
	}, abi.NeedHeaders)
	h := &abi.Header{Layout: abi.LayoutFor(abi.NeedHeaders, headers)}
	for value, want := range map[string]abi.PlanDecision{"gold": abi.PlanDisaggregate, "silver": abi.PlanAggregate} {
		f := &abi.PlanFacts{Request: abi.RequestFacts{Headers: []abi.RequestHeader{{Name: "x-tier", Value: value, Present: true}}}}
		frame := abi.AppendPlan(nil, h, f)
		if a, ok := abi.UnpackPlan(onPlan(frame)); !ok || a.Decision != want {
			t.Errorf("%s: %+v", value, a)
		}
		if n := testing.AllocsPerRun(10, func() { onPlan(frame) }); n != 0 {
			t.Errorf("got %v allocations", n)
		}
	}
}

func TestHooksDoNotAllocate(t *testing.T) {
	f := &abi.PlaceFacts{Fixed: -1, Candidates: make([]abi.Candidate, 64), Request: abi.RequestFacts{Model: "m", Prompt: "[]"}}
	place := abi.AppendPlace(nil, &abi.Header{Policy: 1}, f)
	scratch := make([]byte, 1024)
	leg := abi.AppendLeg(scratch[:0], &abi.Header{}, &abi.LegFacts{Engine: "d0"})
	if n := testing.AllocsPerRun(100, func() { onPlace(place); onLeg(leg, scratch[len(leg):]) }); n != 0 {
		t.Errorf("got %v allocations", n)
	}
}
