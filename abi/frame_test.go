package abi

import (
	"bytes"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func request() RequestFacts {
	return RequestFacts{
		PromptTokens: 1234, MaxTokens: -1, N: 2, Stream: true, PairBroken: true, Shared: 6,
		Model: "llama", Conversation: "c-7", Prompt: `[{"role":"user","content":"hi"}]`, Turn: 3,
	}
}

func placeFacts(rows int) *PlaceFacts {
	f := &PlaceFacts{Request: request(), Flow: FlowConcurrent, Fixed: -1, Sequence: 99, Random: 1 << 63, Adapters: rows > 1}
	for i := range rows {
		f.Candidates = append(f.Candidates, Candidate{
			Instance: uint32(i + 1), Rank: int32(i % 4), Group: 3, Roles: RoleBoth, Trial: i%2 == 1, Pair: PairReady, Home: Role(i % 4),
			Requests: int32(i) * 2, Score: float32(i) / 2, Tokens: int64(i) << 33, Queued: int64(i) * 5,
			BlocksGPU: 7, BlocksCPU: 8, BlocksDisk: 9, BlockTokens: 16, Usage: 0.25, TokenMicros: 12.5, RecentTokens: 99.5, RecentRequests: 1.25, Busy: 0.75,
			Adapter: AdapterState(i % 5), Media: 16, MediaSent: uint8(i % 17),
		})
	}
	return f
}

func legFacts() *LegFacts {
	return &LegFacts{
		Request: request(), Event: LegFailed, Phase: Decode, Flow: FlowPrefillFirst, Attempt: 2, Left: 1, Instance: 5, Rank: 3,
		Partner: 4, PartRank: 1, ID: 1 << 41, Engine: "d0", Status: 503, Elapsed: 12345, Reason: "refused",
	}
}

func finishFacts() *FinishFacts {
	return &FinishFacts{
		Request: request(), Outcome: OutcomeEngineError, Flow: FlowDecodeFirst, Failed: Prefill, Status: 502, Prefill: 1, PrefillRank: 2,
		Decode: 3, DecodeRank: 4, ID: 1 << 42, Attempts: 4, Placed: 10, FirstByte: -1, Total: 3000, PromptTokens: 77, CachedTokens: 64,
		OutputTokens: -1, Reason: "timeout",
	}
}

func retainFacts() *RetainFacts {
	return &RetainFacts{
		ToolCall: true, MostMillis: 450_000, Tokens: 1 << 33, Usage: 0.75,
		Conversation: Gaps{1, 0.125, 2, 3, 4, 5, 6}, Tools: Gaps{7, 0.25, 8, 9, 10, 11, 12}, All: Gaps{13, 0.5, 14, 15, 16, 17, 18},
	}
}

func evictFacts() *EvictFacts {
	return &EvictFacts{
		Saturated: true, Priority: 7, Class: 1, Tenant: 2, PromptTokens: 1 << 33, Remaining: -5,
		Running: []Evictable{{-3, 4, 5, Decode, 6, 7, 8, 9, 10}, {-1, 1 << 31, 0, PhaseNone, 0, 1, 1 << 40, 3, 4}},
	}
}

var header = Header{Policy: 3, Sequence: 41, Random: 42, UnixMilli: 1735689600123, Seed: 7}

// TestFramesKeepTheFacts encodes and decodes the facts of each hook, in a frame
// at the start of the slice and in one after it.
func TestFramesKeepTheFacts(t *testing.T) {
	place := placeFacts(5)
	place.Pairs = []Pair{{Prefill: 0, Decode: 1, State: PairReady, TransferMicros: 0.5}, {Prefill: 2, Decode: 1, State: PairBroken}}
	plan := &PlanFacts{Request: request(), PrefillTargets: 4, DecodeTargets: 5, BothTargets: 6,
		PlanCosts: PlanCosts{PrefillCached: 1 << 40, BothCached: 7, PrefillQueued: 8, BothQueued: 9,
			PrefillMicros: 1.5, BothMicros: 2.5, TransferMicros: 0.25, HandoverMicros: 1000}}
	mint := &MintFacts{UnixMilli: 1735689600123, Node: 255, Worker: 63, Counter: 1023}
	var planned PlanFacts
	var placed PlaceFacts
	var spare []Candidate
	var minted MintFacts
	var leg LegFacts
	var finish FinishFacts
	var retained RetainFacts
	var evicts EvictFacts
	for _, tt := range []struct {
		hook   Hook
		facts  any
		size   int
		append func([]byte) []byte
		decode func([]byte) bool
		got    any
	}{
		{HookPlan, plan, plan.FrameSize(&Layout{}), func(b []byte) []byte { return AppendPlan(b, &header, plan) }, func(b []byte) bool { return DecodePlan(b, &planned) }, &planned},
		{HookPlace, place, place.FrameSize(&Layout{}), func(b []byte) []byte { return AppendPlace(b, &header, place) }, func(b []byte) bool { return DecodePlace(b, &placed, &spare) }, &placed},
		{HookMint, mint, MintFrameSize, func(b []byte) []byte { return AppendMint(b, &header, mint) }, func(b []byte) bool { return DecodeMint(b, &minted) }, &minted},
		{HookLeg, legFacts(), legFacts().FrameSize(&Layout{}), func(b []byte) []byte { return AppendLeg(b, &header, legFacts()) }, func(b []byte) bool { return DecodeLeg(b, &leg) }, &leg},
		{HookFinish, finishFacts(), finishFacts().FrameSize(&Layout{}), func(b []byte) []byte { return AppendFinish(b, &header, finishFacts()) }, func(b []byte) bool { return DecodeFinish(b, &finish) }, &finish},
		{HookRetain, retainFacts(), RetainFrameSize, func(b []byte) []byte { return AppendRetain(b, &header, retainFacts()) }, func(b []byte) bool { return DecodeRetain(b, &retained) }, &retained},
		{HookEvict, evictFacts(), evictFacts().FrameSize(), func(b []byte) []byte { return AppendEvict(b, &header, evictFacts()) }, func(b []byte) bool { return DecodeEvict(b, &evicts) }, &evicts},
	} {
		t.Run(tt.hook.String(), func(t *testing.T) {
			frame := tt.append(nil)
			if len(frame) != tt.size {
				t.Errorf("frame of %d bytes, FrameSize = %d", len(frame), tt.size)
			}
			dirty := bytes.Repeat([]byte{0xff}, 4096)
			if behind := tt.append(dirty[:8]); !bytes.Equal(behind[8:], frame) || &behind[0] != &dirty[0] {
				t.Error("the content of a frame depends on its position in the buffer")
			}
			var h Header
			hook, ok := DecodeHeader(frame, &h)
			want := header
			if tt.hook == HookPlace {
				want.Sequence, want.Random = place.Sequence, place.Random
			}
			if !ok || hook != tt.hook || !reflect.DeepEqual(h, want) {
				t.Errorf("header %+v of %v, %v", h, hook, ok)
			}
			if !tt.decode(frame) {
				t.Fatal("the frame is refused")
			}
			if !reflect.DeepEqual(tt.got, tt.facts) {
				t.Errorf("got  %+v\nwant %+v", tt.got, tt.facts)
			}
			if n := testing.AllocsPerRun(10, func() { tt.append(dirty[:0]); tt.decode(frame) }); n > 1 { // some facts are allocated
				t.Errorf("got %v allocations", n)
			}
		})
	}
}

// TestRowsAreRows: copying a whole table and writing each field give the same
// bytes; a view and a copy give the same rows.
func TestRowsAreRows(t *testing.T) {
	f := placeFacts(9)
	if !bytes.Equal(appendFields(nil, f.Candidates), AppendRows(nil, f.Candidates)) {
		t.Error("fields and rows differ")
	}
	wide := AppendPlace(nil, &header, &PlaceFacts{Fixed: -1})
	put32(wide[HeaderSize:], placeRows, uint32(len(wide)))
	put32(wide[HeaderSize:], placeRows+4, 9)
	put32(wide[HeaderSize:], placeRows+8, RowSize+24)
	for i := range f.Candidates {
		wide = append(appendFields(wide, f.Candidates[i:i+1]), strings.Repeat("\xee", 24)...) // fields that this version does not have
	}
	var got PlaceFacts
	var spare []Candidate
	if !DecodePlace(wide, &got, &spare) || !reflect.DeepEqual(got.Candidates, f.Candidates) {
		t.Errorf("rows of a later version: %+v", got.Candidates)
	}
	got.Candidates[4].Score = 99
	StoreScores(wide, &got)
	if at := get32(wide[HeaderSize:], placeRows); decodeRow(wide[int(at)+4*(RowSize+24):]).Score != 99 {
		t.Error("a score of a copied row does not reach the frame")
	}
	if n := testing.AllocsPerRun(10, func() { DecodePlace(wide, &got, &spare) }); n != 0 {
		t.Errorf("got %v allocations", n)
	}
}

func TestScores(t *testing.T) {
	f, got := placeFacts(3), PlaceFacts{}
	frame := AppendPlace(nil, &header, f)
	var spare []Candidate
	if !DecodePlace(frame, &got, &spare) {
		t.Fatal("the frame is refused")
	}
	got.Candidates[2].Score = -8
	if ReadScores(frame, &header, f); f.Scored || f.Candidates[2].Score != 1 {
		t.Error("ReadScores read scores without OutScored")
	}
	got.Scale = LowWins | UnitBlocks
	StoreScores(frame, &got)
	if ReadScores(frame, &header, f); !f.Scored || f.Candidates[2].Score != -8 || f.Candidates[1].Score != 0.5 || f.Scale != LowWins|UnitBlocks {
		t.Errorf("scores %+v of scale %#x", f.Candidates, f.Scale)
	}
	if DecodePlace(frame, &got, &spare); got.Scored || got.Scale != 0 {
		t.Errorf("the next decision begins with scored %t and scale %#x", got.Scored, got.Scale)
	}
}

// TestScale: values that this version does not know say nothing.
func TestScale(t *testing.T) {
	for _, tt := range []struct {
		scale        Scale
		better, unit string
	}{
		{0, "", ""}, {LowWins, "low", ""}, {HighWins, "high", ""}, {LowWins | UnitSeconds, "low", "s"}, {HighWins | UnitTokens, "high", "tokens"},
		{UnitRequests, "", "requests"}, {LowWins | UnitBlocks, "low", "blocks"}, {UnitShare, "", "share"}, {directionBits | 6<<8, "", ""}, {^Scale(0), "", ""},
	} {
		if better, unit := tt.scale.Better(), tt.scale.Unit(); better != tt.better || unit != tt.unit {
			t.Errorf("%#x: %q %q, want %q %q", tt.scale, better, unit, tt.better, tt.unit)
		}
	}
}

func TestPlanAnswer(t *testing.T) {
	for _, tt := range []struct {
		v    uint64
		want PlanAnswer
		ok   bool
	}{
		{0, PlanAnswer{}, true},
		{2, PlanAnswer{Decision: PlanDisaggregate}, true},
		{3, PlanAnswer{Decision: PlanReject}, true},
		{429<<16 | 3, PlanAnswer{Decision: PlanReject, Status: 429}, true},
		{1500<<32 | 1, PlanAnswer{Decision: PlanAggregate, LimitMillis: 1500}, true},
		{700<<32 | 4, PlanAnswer{Decision: PlanHold, LimitMillis: 700}, true},
		{503<<16 | 4, PlanAnswer{}, false},
		{5, PlanAnswer{}, false},
		{1 << 8, PlanAnswer{}, false},
		{200<<16 | 3, PlanAnswer{}, false},
		{429<<16 | 1, PlanAnswer{}, false},
		{600<<16 | 3, PlanAnswer{}, false},
	} {
		a, ok := UnpackPlan(tt.v)
		if a != tt.want || ok != tt.ok {
			t.Errorf("UnpackPlan(%#x) = %+v, %v", tt.v, a, ok)
		}
		if ok && a.Pack() != tt.v {
			t.Errorf("%+v: got Pack() = %#x, want %#x", a, a.Pack(), tt.v)
		}
	}
}

func TestPlaceAnswer(t *testing.T) {
	for v, want := range map[uint64]PlaceDecision{
		0:                   {},
		0xffffffff_00000003: {Prefill: -1, Decode: 3},
		0x00000002_ffffffff: {Prefill: 2, Decode: -1},
	} {
		if d := UnpackPlace(v); d != want || d.Pack() != v {
			t.Errorf("%#x: %+v, packed again %#x", v, d, d.Pack())
		}
	}
}

func TestLegAnswer(t *testing.T) {
	for _, tt := range []struct {
		v    uint64
		e    LegEvent
		want LegDecision
		ok   bool
	}{
		{0, LegSend, LegPass, true}, {1, LegSend, LegEdited, true}, {2, LegSend, 0, false},
		{1, LegFailed, LegRetry, true}, {3, LegFailed, LegGiveUp, true}, {4, LegFailed, 0, false}, {256, LegFailed, 0, false},
	} {
		if d, ok := UnpackLeg(tt.v, tt.e); d != tt.want || ok != tt.ok {
			t.Errorf("UnpackLeg(%d, %d) = %d, %v", tt.v, tt.e, d, ok)
		}
	}
}

func TestEdits(t *testing.T) {
	e := NewEdits(make([]byte, 256))
	e.SetHeader("x-a", "1")
	e.AddHeader("x-b", "")
	e.RemoveHeader("x-c")
	e.SetField("priority", `{"a":[1]}`)
	e.RemoveField("user")
	var got []Edit
	for list := e.Bytes(); len(list) > 0; {
		edit, rest, ok := NextEdit(list)
		if !ok {
			t.Fatal("the list is refused")
		}
		got, list = append(got, edit), rest
	}
	want := []Edit{
		{EditSetHeader, "x-a", "1"}, {EditAddHeader, "x-b", ""}, {EditRemoveHeader, "x-c", ""},
		{EditSetField, "priority", `{"a":[1]}`}, {EditRemoveField, "user", ""},
	}
	if !reflect.DeepEqual(got, want) || e.Full() {
		t.Errorf("got %+v, full %v", got, e.Full())
	}
	frame := AppendLeg(nil, &header, legFacts())
	MarkEdits(frame, len(frame), len(e.Bytes()))
	if at, n := EditsOf(frame); at != len(frame) || n != len(e.Bytes()) {
		t.Errorf("edits at %d, %d bytes", at, n)
	}
	small := NewEdits(make([]byte, 20))
	small.SetHeader("x-a", "1")
	small.SetHeader("x-a", "2")
	if !small.Full() || len(small.Bytes()) != 16 {
		t.Errorf("full %v, %d bytes", small.Full(), len(small.Bytes()))
	}
}

func TestHookNames(t *testing.T) {
	for h := HookPlan; h <= LastHook; h++ {
		if got, ok := ParseHook(h.String()); got != h || !ok || h.Export() != "pdproxy_v1_on_"+h.String() {
			t.Errorf("%d: ParseHook(h.String()) = %v, %v, %s", h, got, ok, h.Export())
		}
	}
	for _, s := range []string{"", "none", "Plan"} {
		if _, ok := ParseHook(s); ok {
			t.Errorf("%q is a hook", s)
		}
	}
	if got := Hook(77).String(); got != "none" {
		t.Errorf("hook 77 is %q", got)
	}
	if got := strings.Join((NeedPrompt | NeedPairs | 1<<40).Names(), " "); got != "prompt pairs" {
		t.Errorf("needs %q", got)
	}
}

// FuzzDecode: decoding any bytes ends without a panic. Facts that it accepts
// make a frame that decodes to the same facts.
func FuzzDecode(f *testing.F) {
	place := placeFacts(3)
	place.Pairs = []Pair{{Prefill: 1}}
	f.Add(AppendPlan(nil, &header, &PlanFacts{Request: request()}))
	f.Add(AppendPlace(nil, &header, place))
	f.Add(AppendMint(nil, &header, &MintFacts{UnixMilli: 5}))
	f.Add(AppendLeg(nil, &header, legFacts()))
	f.Add(AppendFinish(nil, &header, finishFacts()))
	f.Add(AppendRetain(nil, &header, retainFacts()))
	f.Add(AppendEvict(nil, &header, evictFacts()))
	extended := header
	extended.Extended = true
	f.Add(AppendPlace(nil, &extended, detailed(3)))
	f.Add(AppendLeg(nil, &extended, legFacts()))
	declaring := extended
	declaring.Traits, declaring.Headers = true, []string{"x-a", "x-b"}
	told := legFacts()
	told.Request.Headers = []RequestHeader{{Name: "x-b", Value: "1", Present: true, Cut: true}}
	f.Add(AppendLeg(nil, &declaring, told))
	scored, optional := scoreFacts()
	f.Add(AppendScore(nil, &optional, scored, []uint32{1, 0}))
	f.Fuzz(func(t *testing.T, b []byte) {
		var h Header
		if _, ok := DecodeHeader(b, &h); !ok {
			return
		}
		var plan PlanFacts
		DecodePlan(b, &plan)
		var spareScore []Candidate
		DecodeScore(b, &ScoreFacts{PlaceFacts: &PlaceFacts{}}, &spareScore)
		var mint MintFacts
		DecodeMint(b, &mint)
		var finish FinishFacts
		DecodeFinish(b, &finish)
		var retained RetainFacts
		DecodeRetain(b, &retained)
		var evicts EvictFacts
		if DecodeEvict(b, &evicts) && len(evicts.Running) > MaxEvictable {
			t.Errorf("a frame with %d rows is accepted", len(evicts.Running))
		}
		var leg, again LegFacts
		if DecodeLeg(b, &leg) {
			h.Headers = nil
			for i := range leg.Request.Headers { // the frame of the host has a row for each name
				leg.Request.Headers[i].Name = strconv.Itoa(i)
				h.Headers = append(h.Headers, strconv.Itoa(i))
			}
			nameless := func(f LegFacts) LegFacts {
				f.Request.Headers = slices.Clone(f.Request.Headers)
				for i := range f.Request.Headers {
					f.Request.Headers[i].Name = ""
				}
				return f
			}
			if !DecodeLeg(AppendLeg(nil, &h, &leg), &again) || !reflect.DeepEqual(nameless(leg), nameless(again)) {
				t.Errorf("%+v became %+v", leg, again)
			}
		}
		var p PlaceFacts
		var spare []Candidate
		h.Headers = nil
		if DecodePlace(b, &p, &spare) {
			frame := AppendPlace(nil, &h, &p)
			for i := range p.Candidates {
				p.Candidates[i].Score++
			}
			StoreScores(b, &p)
			ReadScores(frame, &h, &p)
		}
	})
}

func FuzzNextEdit(f *testing.F) {
	e := NewEdits(make([]byte, 64))
	e.SetField("a", "1")
	f.Add(e.Bytes())
	f.Fuzz(func(t *testing.T, list []byte) {
		for len(list) > 0 {
			_, rest, ok := NextEdit(list)
			if !ok {
				return
			}
			if len(rest) >= len(list) {
				t.Fatal("no progress")
			}
			list = rest
		}
	})
}

func TestAdapterState(t *testing.T) {
	for s := range AdapterFull + 1 {
		if got, ok := ParseAdapterState(s.String()); got != s || !ok {
			t.Errorf("ParseAdapterState(%q) = %v, %v", s.String(), got, ok)
		}
	}
	if s, ok := ParseAdapterState(""); s != AdapterUnknown || !ok {
		t.Errorf("no text is %v, %v", s, ok)
	}
	if _, ok := ParseAdapterState("loaded"); ok || AdapterState(200).String() != "unknown" {
		t.Error("an unknown state is accepted")
	}
}

func TestRetainDecision(t *testing.T) {
	for _, d := range []RetainDecision{{}, {1, FullLikelihood}, {1<<32 - 1, 1}} {
		if got, ok := UnpackRetain(d.Pack()); got != d || !ok {
			t.Errorf("UnpackRetain(%+v.Pack()) = %+v, %v", d, got, ok)
		}
	}
	if _, ok := UnpackRetain(1 << 48); ok {
		t.Error("an undefined bit is accepted")
	}
}

// TestEvictAnswer: only a row of the frame, or none, is an answer.
func TestEvictAnswer(t *testing.T) {
	f := evictFacts()
	for row := int32(EvictNone); row < 2; row++ {
		if got, ok := UnpackEvict(PackEvict(row), f); got != row || !ok {
			t.Errorf("UnpackEvict(PackEvict(%d)) = %d, %v", row, got, ok)
		}
	}
	for _, v := range []uint64{3, 1 << 32, ^uint64(0)} {
		if row, ok := UnpackEvict(v, f); ok || row != EvictNone {
			t.Errorf("UnpackEvict(%#x) = %d, %v", v, row, ok)
		}
	}
}

// FuzzEvictAnswer: each answer of a guest is a row of the frame, none, or refused.
func FuzzEvictAnswer(f *testing.F) {
	f.Add(uint64(0), 1)
	f.Add(uint64(2), 1)
	f.Add(^uint64(0), 32)
	f.Fuzz(func(t *testing.T, v uint64, rows int) {
		facts := &EvictFacts{Running: make([]Evictable, min(max(rows, 0), MaxEvictable))}
		row, ok := UnpackEvict(v, facts)
		switch {
		case row < EvictNone || int(row) >= len(facts.Running):
			t.Errorf("%#x is row %d of %d", v, row, len(facts.Running))
		case ok && PackEvict(row) != v, !ok && row != EvictNone:
			t.Errorf("%#x is row %d, %v", v, row, ok)
		}
	})
}
