package journal

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// ended returns the record of a request that one decode engine served.
func ended(id string, change func(r *Journal)) *Record {
	r := opened(id)
	r.Placed(&coordinator.Placement{Flow: abi.FlowAggregated, Decode: targetNamed("d0"), Matched: -1}, 0)
	r.ended, r.Status, r.Outcome = at(5), 200, telemetry.OutcomeOK
	if change != nil {
		change(r)
	}
	return &r.Record
}

func ids(rows []EndedRow) (list []string) {
	for _, r := range rows {
		list = append(list, r.RequestID)
	}
	return list
}

// TestRecentTrouble: a request is listed if it failed, lost a leg or deviated, and not if its
// client was at fault or has left.
func TestRecentTrouble(t *testing.T) {
	s := new(Ring)
	for id, change := range map[string]func(r *Journal){
		"ok":           nil,
		"client error": func(r *Journal) { r.Outcome = telemetry.OutcomeClientError },
		"cancelled": func(r *Journal) {
			r.Outcome = telemetry.OutcomeCancelled
			r.LegCancelled(begin(r, abi.Decode, targetNamed("d0"), 1, ""), "")
		},
		"! broken":    func(r *Journal) { r.Outcome = telemetry.OutcomeBroken },
		"! shed":      func(r *Journal) { r.Outcome = telemetry.OutcomeShed },
		"! no target": func(r *Journal) { r.Outcome = telemetry.OutcomeNoTarget },
		"! fallback":  func(r *Journal) { r.Fallback("mint", "late") },
		"! lost leg": func(r *Journal) {
			r.LegFailed(begin(r, abi.Decode, targetNamed("d1"), 1, ""), "dial", "dial engine: connection refused")
		},
	} {
		s.put(ended(id, change))
	}
	got := s.Recent(0)
	if n := len(got.Latest); n != 8 || got.Next != 8 {
		t.Errorf("%d requests, next position %d", n, got.Next)
	}
	troubled := ids(got.Troubled)
	slices.Sort(troubled)
	if want := []string{"! broken", "! fallback", "! lost leg", "! no target", "! shed"}; !slices.Equal(troubled, want) {
		t.Errorf("troubled are %q", troubled)
	}
	for _, r := range got.Troubled {
		switch r.RequestID {
		case "! lost leg":
			if !slices.Equal(r.FailedLegs, []FailedLeg{{"decode", "d1", "dial"}}) {
				t.Errorf("failed legs %+v", r.FailedLegs)
			}
		case "! fallback":
			if !slices.Equal(r.Fallbacks, []ExplainedFallback{{"mint", "late"}}) {
				t.Errorf("got fallbacks %+v", r.Fallbacks)
			}
		}
	}
}

// TestRecentContinuations: a row and the explanation of a request have the places at which its
// stream broke off.
func TestRecentContinuations(t *testing.T) {
	s := new(Ring)
	s.put(ended("moved", func(r *Journal) {
		r.Continued(57, 83*time.Millisecond)
		r.NotContinued(90, "tool_calls")
		r.seams[0].at, r.seams[1].at = at(2), at(4)
	}))
	gap := 83.0
	want := []ExplainedContinuation{{AtMS: 2, Tokens: 57, Result: "continued", GapMS: &gap, Decode: "d0"}, {AtMS: 4, Tokens: 90, Result: "tool_calls"}}
	e, ok := s.Get("moved")
	for name, got := range map[string][]ExplainedContinuation{"row": s.Recent(0).Latest[0].Continuations, "explanation": e.Continuations} {
		if !ok || !reflect.DeepEqual(got, want) {
			t.Errorf("the %s has %+v", name, got)
		}
	}
}

// TestRecentFlood: many requests with the same trouble do not hide one with another trouble.
func TestRecentFlood(t *testing.T) {
	s := new(Ring)
	s.put(ended("broken", func(r *Journal) { r.Outcome = telemetry.OutcomeBroken }))
	for i := range 1000 {
		s.put(ended(fmt.Sprint(i), func(r *Journal) { r.Fallback("place", "parked") }))
	}
	if got := ids(s.Recent(0).Troubled); len(got) != maxAlike+1 || got[0] != "999" || got[maxAlike] != "broken" {
		t.Errorf("troubled are %q", got)
	}
}

// TestRecentPositions: a reader that continues at Next sees each request once, also after the
// ring has forgotten some, and a reader of another process sees all.
func TestRecentPositions(t *testing.T) {
	s := new(Ring)
	put := func(from, to int) {
		for i := from; i < to; i++ {
			s.put(ended(fmt.Sprint(i), func(r *Journal) { r.Usage = openai.Usage{Prompt: 10, Cached: int64(i % 2)} }))
		}
	}
	if got := s.Recent(0); got.Next != 0 || len(got.Latest) != 0 || len(got.Prompts) != 0 {
		t.Errorf("an empty ring: %+v", got)
	}
	put(0, 3)
	first := s.Recent(0)
	if !slices.Equal(ids(first.Latest), []string{"2", "1", "0"}) || !maps.Equal(first.Prompts, map[string]PromptTokens{"d0": {30, 1}}) {
		t.Errorf("at first: %+v", first)
	}
	put(3, 5)
	if got := s.Recent(first.Next); !slices.Equal(ids(got.Latest), []string{"4", "3"}) || got.Prompts["d0"] != (PromptTokens{20, 1}) {
		t.Errorf("then: %+v", got)
	}
	if got := s.Recent(5); got.Next != 5 || len(got.Latest) != 0 {
		t.Errorf("nothing new: %+v", got)
	}
	put(5, 2*RingSize+5)
	got := s.Recent(5)
	if got.Prompts["d0"].Tokens != 10*RingSize || len(got.Latest) != maxLatest || got.Latest[0].RequestID != fmt.Sprint(2*RingSize+4) {
		t.Errorf("after a long time: %d tokens, %q", got.Prompts["d0"].Tokens, ids(got.Latest))
	}
	if got := s.Recent(1 << 40); got.Prompts["d0"].Tokens != 10*RingSize {
		t.Errorf("a position of another process: %d tokens", got.Prompts["d0"].Tokens)
	}
}

// TestDuring: a period has the requests that ran at some time of it, those in trouble apart, and the
// ring says from when it has all.
func TestDuring(t *testing.T) {
	s := new(Ring)
	put := func(id string, start, end int, outcome telemetry.Outcome) {
		s.put(ended(id, func(r *Journal) { r.Start, r.ended, r.Outcome = at(start), at(end), outcome }))
	}
	put("before", 0, 9, telemetry.OutcomeOK)
	put("into", 0, 10, telemetry.OutcomeOK)
	put("broken", 12, 13, telemetry.OutcomeBroken)
	put("within", 12, 14, telemetry.OutcomeOK)
	put("all along", 1, 30, telemetry.OutcomeOK)
	put("out of", 20, 31, telemetry.OutcomeCancelled)
	put("after", 21, 32, telemetry.OutcomeBroken)
	got := s.During(at(10), at(20))
	if want := []string{"out of", "all along", "within", "into"}; !slices.Equal(ids(got.Others), want) {
		t.Errorf("others %q, want %q", ids(got.Others), want)
	}
	if !slices.Equal(ids(got.Troubled), []string{"broken"}) || got.Total != 5 || got.Since != 0 {
		t.Errorf("got %+v", got)
	}
	if got := s.During(at(100), at(200)); got.Total != 0 || got.Troubled == nil || got.Others == nil {
		t.Errorf("an empty period: %+v", got)
	}
	for n := range RingSize {
		put(fmt.Sprint(n), 40, 41+n, telemetry.OutcomeOK)
	}
	got = s.During(at(10), at(20))
	if want := unix(at(41)); got.Total != 0 || got.Since != want {
		t.Errorf("after a full ring: %+v, want since %v", got, want)
	}
	if got := s.During(at(0), at(1e6)); got.Total != RingSize || len(got.Others) != MaxDuring || got.Others[0].RequestID != fmt.Sprint(RingSize-1) {
		t.Errorf("a long period: %d rows of %d", len(got.Others), got.Total)
	}
}
