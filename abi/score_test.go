package abi

import (
	"math"
	"reflect"
	"slices"
	"testing"
)

// scoreFacts are the facts of a decode leg with every optional fact.
func scoreFacts() (*ScoreFacts, Header) {
	place := detailed(3)
	place.Pairs = []Pair{{Prefill: 0, Decode: 1, State: PairReady}}
	place.Predictions = []Prediction{{Prefill: 1}, {Token: 2}, {Start: 3}}
	place.Request.Salt, place.Request.Adapter = 9, "sql"
	place.Request.Headers = []RequestHeader{{Name: "x-b", Value: "odd", Present: true}}
	h := header
	h.Traits, h.Headers = true, []string{"x-a", "x-b"}
	return &ScoreFacts{PlaceFacts: place, Phases: RoleDecode, Prefill: 0, Open: []bool{false, true, true}}, h
}

// TestScoreFrame: a guest reads the facts that the host wrote, and the host reads the scores and
// units that the guest wrote.
func TestScoreFrame(t *testing.T) {
	full, declaring := scoreFacts()
	bare := &ScoreFacts{PlaceFacts: placeFacts(2), Phases: RoleBoth, Prefill: -1, Open: []bool{true, true}}
	for name, tt := range map[string]struct {
		f *ScoreFacts
		h Header
	}{"all facts": {full, declaring}, "no facts of version 2": {bare, header}} {
		t.Run(name, func(t *testing.T) {
			scorers := []uint32{4, 0, 4}
			frame := AppendScore(nil, &tt.h, tt.f, scorers)
			if size := tt.f.FrameSize(&tt.h.Layout, len(scorers)); size != len(frame) {
				t.Errorf("FrameSize %d, the frame has %d bytes", size, len(frame))
			}
			got, spare := ScoreFacts{PlaceFacts: &PlaceFacts{}}, []Candidate(nil)
			asked, rows, ok := DecodeScore(frame, &got, &spare)
			if !ok || len(asked) != 3 || asked[0].Index != 4 || asked[1].Index != 0 || len(rows) != 3*len(tt.f.Candidates) {
				t.Fatalf("DecodeScore = %v, %v, %v", asked, rows, ok)
			}
			if got.Phases != tt.f.Phases || got.Prefill != tt.f.Prefill || !slices.Equal(got.Open, tt.f.Open) || !reflect.DeepEqual(got.Candidates, tt.f.Candidates) ||
				!reflect.DeepEqual(got.Details, tt.f.Details) || got.Request.Model != tt.f.Request.Model || got.Request.Traits != tt.f.Request.Traits || got.Adapters != tt.f.Adapters {
				t.Errorf("got %+v of %+v, want %+v of %+v", got, got.PlaceFacts, tt.f, tt.f.PlaceFacts)
			}
			if value, found := got.Request.Headers, len(tt.h.Headers); len(value) != found || found > 0 && value[1].Value != "odd" {
				t.Errorf("headers %+v", value)
			}
			for i := range rows {
				rows[i] = RowScore{float32(i) / 10, float32(i)}
			}
			rows[0], rows[1] = RowScore{float32(math.NaN()), float32(math.Inf(1))}, RowScore{7, -1}
			rows[2], asked[2].Unit = RowScore{Score: -9}, UnitTokens|HighWins
			out, units := make([]RowScore, len(rows)), make([]Scale, 3)
			ReadRowScores(frame, tt.f, out, units)
			want := slices.Clone(rows)
			want[0], want[1], want[2] = RowScore{}, RowScore{1, -1}, RowScore{Score: Removed}
			if !slices.Equal(out, want) || !slices.Equal(units, []Scale{0, 0, UnitTokens}) {
				t.Errorf("scores %v with %v, want %v", out, units, want)
			}
			if n := testing.AllocsPerRun(10, func() {
				frame = AppendScore(frame[:0], &tt.h, tt.f, scorers)
				DecodeScore(frame, &got, &spare)
				ReadRowScores(frame, tt.f, out, units)
			}); n != 0 {
				t.Errorf("got %v allocations", n)
			}
		})
	}
}

// TestScoreFrameRefused: a guest refuses frames whose tables do not fit.
func TestScoreFrameRefused(t *testing.T) {
	f, h := scoreFacts()
	for name, change := range map[string]func(frame []byte){
		"version 1":                    func(b []byte) { b[offVersion] = 1 },
		"another hook":                 func(b []byte) { b[offHook] = byte(HookPlace) },
		"prefill is no row":            func(b []byte) { put32(b, HeaderSize+scorePrefill, 3) },
		"open has another size":        func(b []byte) { put32(b, HeaderSize+scoreOpen+4, 2) },
		"scores of another size":       func(b []byte) { put32(b, HeaderSize+scoreRows+8, 12) },
		"too few scores":               func(b []byte) { put32(b, HeaderSize+scoreRows+4, 5) },
		"scorers beyond the frame":     func(b []byte) { put32(b, HeaderSize+scoreScorers, 1<<20) },
		"scores at an odd address":     func(b []byte) { put32(b, HeaderSize+scoreRows, get32(b, HeaderSize+scoreRows)-4) },
		"facts shorter than the score": func(b []byte) { put32(b, offFacts, scoreSize-8) },
	} {
		frame := AppendScore(nil, &h, f, []uint32{0, 1})
		change(frame)
		var spare []Candidate
		if _, _, ok := DecodeScore(frame, &ScoreFacts{PlaceFacts: &PlaceFacts{}}, &spare); ok {
			t.Errorf("%s: accepted", name)
		}
	}
}

// TestCloseRemoved: a scorer removes candidates, but never all of them.
func TestCloseRemoved(t *testing.T) {
	for name, tt := range map[string]struct {
		open   []bool
		scores []float32
		want   []bool
		kept   bool
	}{
		"none":              {[]bool{true, true}, []float32{0, 1}, []bool{true, true}, false},
		"one":               {[]bool{true, true, true}, []float32{0, Removed, 1}, []bool{true, false, true}, false},
		"all":               {[]bool{true, false, true}, []float32{Removed, 1, -0.5}, []bool{true, false, true}, true},
		"a closed one":      {[]bool{true, false}, []float32{1, Removed}, []bool{true, false}, false},
		"not a number":      {[]bool{true, true}, []float32{float32(math.NaN()), Removed}, []bool{true, false}, false},
		"without open rows": {[]bool{false}, []float32{Removed}, []bool{false}, false},
	} {
		rows := make([]RowScore, len(tt.scores))
		for i, s := range tt.scores {
			rows[i].Score = s
		}
		if kept := CloseRemoved(tt.open, rows); kept != tt.kept || !slices.Equal(tt.open, tt.want) {
			t.Errorf("%s: CloseRemoved = %v, open %v, want %v, %v", name, kept, tt.open, tt.kept, tt.want)
		}
	}
}
