package abi

import (
	"bytes"
	"hash/fnv"
	"reflect"
	"strings"
	"testing"
)

func identified() RequestFacts {
	r := request()
	r.Identity = Identity{Client: 1 << 63, Tenant: 7, Class: 3}
	r.extended = true
	return r
}

func detailed(rows int) *PlaceFacts {
	f := placeFacts(rows)
	f.Request = identified()
	for i := range rows {
		d := Detail{Zone: uint32(i), Revision: 2, Hardware: 3, Weight: 0.5, Running: int32(i), Waiting: -1}
		for n := range d.Labels {
			d.Labels[n] = Label{uint32(10 * n), uint32(10*n + i)}
		}
		f.Details = append(f.Details, d)
	}
	return f
}

// TestFramesOfVersion2: the facts that version 2 added survive the encoding, also
// in rows of a later version. A frame of version 1 does not carry them, and has the
// bytes that it has without them.
func TestFramesOfVersion2(t *testing.T) {
	h := header
	h.Extended = true
	place, plan := detailed(5), &PlanFacts{Request: identified(), PlanCosts: PlanCosts{BothMicros: 2}}
	place.Pairs = []Pair{{Prefill: 0, Decode: 1, State: PairReady}}
	leg, finish := legFacts(), finishFacts()
	leg.Request, finish.Request = identified(), identified()
	var planned PlanFacts
	var placed PlaceFacts
	var spare []Candidate
	var legGot LegFacts
	var finished FinishFacts
	for _, tt := range []struct {
		name   string
		facts  interface{ FrameSize(*Layout) int }
		append func(h *Header) []byte
		decode func(b []byte) bool
		got    any
		strip  func()
	}{
		{"plan", plan, func(h *Header) []byte { return AppendPlan(nil, h, plan) }, func(b []byte) bool { return DecodePlan(b, &planned) }, &planned,
			func() { plan.Request.Identity, plan.Request.extended = Identity{}, false }},
		{"place", place, func(h *Header) []byte { return AppendPlace(nil, h, place) }, func(b []byte) bool { return DecodePlace(b, &placed, &spare) }, &placed,
			func() { place.Request.Identity, place.Request.extended, place.Details = Identity{}, false, nil }},
		{"leg", leg, func(h *Header) []byte { return AppendLeg(nil, h, leg) }, func(b []byte) bool { return DecodeLeg(b, &legGot) }, &legGot,
			func() { leg.Request.Identity, leg.Request.extended = Identity{}, false }},
		{"finish", finish, func(h *Header) []byte { return AppendFinish(nil, h, finish) }, func(b []byte) bool { return DecodeFinish(b, &finished) }, &finished,
			func() { finish.Request.Identity, finish.Request.extended = Identity{}, false }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			frame := tt.append(&h)
			if len(frame) != tt.facts.FrameSize(&Layout{Extended: true}) {
				t.Errorf("frame of %d bytes, FrameSize = %d", len(frame), tt.facts.FrameSize(&Layout{Extended: true}))
			}
			var got Header
			if _, ok := DecodeHeader(frame, &got); !ok || !got.Extended || get16(frame, offVersion) != 2 {
				t.Errorf("header %+v, %v", got, ok)
			}
			if !tt.decode(frame) || !reflect.DeepEqual(tt.got, any(tt.facts)) {
				t.Errorf("got  %+v\nwant %+v", tt.got, tt.facts)
			}
			put32(frame, offFacts, get32(frame, offFacts)-8)
			if tt.decode(frame) {
				t.Error("facts that are too short for version 2 are accepted")
			}
			first := tt.append(&header)
			tt.strip()
			if without := tt.append(&header); !bytes.Equal(first, without) || get16(first, offVersion) != 1 {
				t.Error("the facts of version 2 change a frame of version 1")
			}
			if !tt.decode(first) || !reflect.DeepEqual(tt.got, any(tt.facts)) {
				t.Errorf("version 1: got  %+v\nwant %+v", tt.got, tt.facts)
			}
		})
	}
}

// TestDetailRows: a copy of the whole table and one of each field are the same; rows
// with another stride are copied; a table of another length is refused.
func TestDetailRows(t *testing.T) {
	h := header
	h.Extended = true
	f := detailed(3)
	if !bytes.Equal(appendDetails(nil, f.Details), appendDetailFields(nil, f.Details)) {
		t.Error("fields and rows differ")
	}
	const at = HeaderSize + placeSize + identitySize + moreDetails
	frame := AppendPlace(nil, &h, f)
	put32(frame, at, uint32(len(frame)))
	put32(frame, at+8, DetailSize+8)
	for i := range f.Details {
		frame = append(appendDetailFields(frame, f.Details[i:i+1]), strings.Repeat("\xee", 8)...)
	}
	var got PlaceFacts
	var spare []Candidate
	if !DecodePlace(frame, &got, &spare) || !reflect.DeepEqual(got.Details, f.Details) {
		t.Errorf("rows of a later version: %+v", got.Details)
	}
	for _, n := range []uint32{1, 4, 1 << 31} {
		put32(frame, at+4, n)
		if DecodePlace(frame, &got, &spare) {
			t.Errorf("a table of %d rows for 3 candidates is accepted", n)
		}
	}
	place := AppendPlace(nil, &h, f)
	StoreScores(place, f)
	f.Candidates[1].Score = 77
	if ReadScores(place, &h, f); !f.Scored || f.Candidates[1].Score != 0.5 {
		t.Errorf("score %v", f.Candidates[1].Score)
	}
	buffer := make([]byte, 4096)
	if n := testing.AllocsPerRun(10, func() { DecodePlace(AppendPlace(buffer[:0], &h, f), &got, &spare) }); n != 0 {
		t.Errorf("got %v allocations", n)
	}
}

func TestLabels(t *testing.T) {
	for _, text := range []string{"a", "zone", strings.Repeat("x", MaxLabelSize)} {
		hash := fnv.New32a()
		_, _ = hash.Write([]byte(text))
		if LabelID(text) != hash.Sum32() {
			t.Errorf("LabelID(%q) = %d, want %d", text, LabelID(text), hash.Sum32())
		}
	}
	if LabelID("") != 0 {
		t.Error("the number of no label is not 0")
	}
	d := Detail{Weight: 2, Running: 3, Waiting: 4}
	if err := d.SetLabels(map[string]string{"zone": "a", "rack": "7", "hardware": "h100", "pool": "x"}); err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]string{"zone": "a", "rack": "7", "hardware": "h100", "pool": "x", "revision": "", "none": ""} {
		if got := d.Value(LabelID(name)); got != LabelID(value) {
			t.Errorf("%s: %d", name, got)
		}
	}
	if d.Weight != 2 || d.Running != 3 || d.Waiting != 4 || d.Labels[0].Name != LabelID("pool") {
		t.Errorf("%+v", d)
	}
	for _, bad := range []map[string]string{
		{"": "a"}, {"a": ""}, {strings.Repeat("x", MaxLabelSize+1): "a"}, {"a": strings.Repeat("x", MaxLabelSize+1)},
		{"a": "1", "b": "1", "c": "1", "d": "1", "e": "1", "f": "1"},
	} {
		if err := d.SetLabels(bad); err == nil {
			t.Errorf("%v is accepted", bad)
		}
	}
}

func TestNeedsVersion(t *testing.T) {
	for needs, want := range map[Needs]uint16{0: 1, NeedPairs | NeedBlocks: 1, NeedDetails: 2, NeedIdentity | NeedPrompt: 2, 1 << 40: 1} {
		if got := needs.Version(); got != want {
			t.Errorf("%b: version %d, want %d", needs, got, want)
		}
	}
}

// BenchmarkPlaceFrame writes the place frame of 64 candidates in both versions.
func BenchmarkPlaceFrame(b *testing.B) {
	buffer, f := make([]byte, 1<<16), detailed(64)
	for name, extended := range map[string]bool{"version 1": false, "version 2": true} {
		b.Run(name, func(b *testing.B) {
			h := header
			h.Extended = extended
			b.ReportAllocs()
			for b.Loop() {
				AppendPlace(buffer[:0], &h, f)
			}
		})
	}
}
