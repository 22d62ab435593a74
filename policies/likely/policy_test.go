package likely

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

const lease = 450_000

// quick are gaps of which nine in ten are below a second.
var quick = abi.Gaps{Turns: 100, Back: 0.95, P50: 100, P75: 300, P90: 1000, P95: 8000, P99: 100_000}

// slow are gaps of minutes, after which most conversations do not return.
var slow = abi.Gaps{Turns: 100, Back: 0.2, P50: 120_000, P75: 200_000, P90: 300_000, P95: 350_000, P99: 400_000}

// TestRetain compares the decisions about turns with the bounds of their times in ms.
func TestRetain(t *testing.T) {
	p := Defaults()
	for name, tt := range map[string]struct {
		facts       abi.RetainFacts
		least, most uint32
		likely      uint16 // smallest likelihood
	}{
		"no gaps are known":                   {abi.RetainFacts{Usage: 0.9}, lease, lease, certain / 2},
		"few gaps are known":                  {abi.RetainFacts{Usage: 0.9, All: abi.Gaps{Turns: 7}}, lease, lease, certain / 2},
		"quick tool, free memory":             {abi.RetainFacts{Usage: 0.1, All: quick}, lease, lease, certain * 9 / 10},
		"quick tool, half of memory":          {abi.RetainFacts{Usage: 0.5, All: quick}, 10_000, lease / 2, certain * 9 / 10},
		"quick tool, little memory":           {abi.RetainFacts{Usage: 0.95, All: quick}, 1000, 15_000, certain * 8 / 10},
		"slow user, free memory":              {abi.RetainFacts{Usage: 0.05, All: slow}, lease / 2, lease, certain / 10},
		"slow user, half of memory":           {abi.RetainFacts{Usage: 0.5, All: slow}, 0, 0, 0},
		"nobody returns":                      {abi.RetainFacts{Usage: 0.1, All: abi.Gaps{Turns: 50}}, 0, 0, 0},
		"slow tool of quick conversations":    {abi.RetainFacts{Usage: 0.5, Tools: slow, All: quick}, 0, 0, 0},
		"quick conversation with a slow tool": {abi.RetainFacts{Usage: 0.5, Conversation: quick, Tools: slow, All: slow}, 10_000, lease / 2, certain * 9 / 10},
		"full memory":                         {abi.RetainFacts{Usage: 1, All: quick}, 0, 0, 0},
	} {
		tt.facts.MostMillis = lease
		d := p.Retain(&tt.facts)
		if d.Millis < tt.least || d.Millis > tt.most || d.Likelihood < tt.likely || d.Likelihood == abi.FullLikelihood {
			t.Errorf("%s: %+v, want %d to %d ms with a likelihood from %d", name, d, tt.least, tt.most, tt.likely)
		}
	}
}

// TestFewTurnsCountLess: a conversation with few turns counts less than all conversations, and the
// weights of all three add up to 1.
func TestFewTurnsCountLess(t *testing.T) {
	p := Defaults()
	few := slow
	few.Turns = 2
	f := &abi.RetainFacts{Conversation: few, All: quick}
	if w := p.weights(f); w != [3]float64{0.25, 0, 0.75} {
		t.Errorf("weights %v", w)
	}
}

// TestWithin: the share grows with the time, from 0 to the share of turns that come back.
func TestWithin(t *testing.T) {
	last := 0.0
	for ms := 0.0; ms <= lease; ms += 500 {
		share := within(&quick, ms, lease)
		if share < last || share > 0.95 {
			t.Fatalf("%v after %v at %v ms", share, last, ms)
		}
		last = share
	}
	if first := within(&quick, 0, lease); first != 0 || last < 0.949 || last > 0.951 {
		t.Errorf("from %v to %v", first, last)
	}
	if share := within(&abi.Gaps{Back: 1}, 1, lease); share < 0.98 {
		t.Errorf("gaps of nothing: %v", share)
	}
}

func FuzzRetain(f *testing.F) {
	f.Add(uint32(lease), float32(0.5), float32(9), float32(0.9), float32(100), float32(50))
	f.Fuzz(func(t *testing.T, most uint32, usage, turns, back, p50, p75 float32) {
		p := Defaults()
		g := abi.Gaps{Turns: turns, Back: back, P50: p50, P75: p75, P90: p75, P95: p50, P99: p75}
		d := p.Retain(&abi.RetainFacts{MostMillis: most, Usage: usage, Conversation: g, All: g})
		if d.Millis > most || d.Likelihood == abi.FullLikelihood {
			t.Errorf("%+v of at most %d ms", d, most)
		}
	})
}
