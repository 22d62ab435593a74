package loadgen

import (
	"slices"
	"strings"
	"testing"
)

func TestParseLimits(t *testing.T) {
	if l, err := ParseLimits("ttft=1.5s,itl=50ms"); err != nil || l != (Limits{TTFT: 1500, ITL: 50}) {
		t.Errorf("%+v %v", l, err)
	}
	if l, err := ParseLimits("e2e=10s"); err != nil || l != (Limits{Total: 10000}) {
		t.Errorf("%+v %v", l, err)
	}
	if l, err := ParseLimits(""); err != nil || l != (Limits{}) {
		t.Errorf("%+v %v", l, err)
	}
	for _, text := range []string{"ttft", "ttft=5", "ttft=-5ms", "itl=0s", "p99=1s", "ttft=1s,ttft=2s", "ttft=1s,"} {
		if l, err := ParseLimits(text); err == nil {
			t.Errorf("%q is %+v", text, l)
		}
	}
}

func TestWithin(t *testing.T) {
	for _, tt := range []struct {
		l    Limits
		want bool
	}{
		{Limits{}, true}, {Limits{TTFT: 100}, true}, {Limits{TTFT: 99}, false}, {Limits{ITL: 5}, true}, {Limits{ITL: 4.9}, false},
		{Limits{Total: 120}, true}, {Limits{Total: 119}, false}, {Limits{TTFT: 100, ITL: 1}, false},
	} {
		// Two events with three tokens after the first: a token takes 5 ms.
		if got := tt.l.within(&Sample{First: 100, Gaps: []float64{10, 5}, Total: 120, Output: 4}); got != tt.want {
			t.Errorf("%+v: %v", tt.l, got)
		}
	}
	if l := (Limits{ITL: 1}); !l.within(&Sample{First: 100, Total: 120, Output: 1}) {
		t.Error("an answer of one token has no time between tokens")
	}
}

func TestParseSweep(t *testing.T) {
	s, err := ParseSweep("rate=1,2.5,40")
	if err != nil || s.Name != SweepRate || !slices.Equal(s.Values, []float64{1, 2.5, 40}) {
		t.Fatalf("%+v %v", s, err)
	}
	if c := s.Config(Config{Seed: 7, Concurrency: 3}, 1); c.Rate != 2.5 || c.Seed != 8 || c.Label != "rate=2.5" || c.Concurrency != 3 {
		t.Errorf("%+v", c)
	}
	s = Sweep{Name: SweepConcurrency, Values: []float64{8}}
	if c := s.Config(Config{}, 0); c.Concurrency != 8 || c.Rate != 0 || c.Label != "concurrency=8" {
		t.Errorf("%+v", c)
	}
	s = Sweep{Name: SweepSpeed, Values: []float64{.5}}
	if c := s.Config(Config{}, 0); c.Speed != .5 {
		t.Errorf("%+v", c)
	}
	for _, text := range []string{"", "rate", "rate=", "rate=0", "rate=-1", "rate=x", "rate=NaN", "rate=Inf", "rate=1,1", "concurrency=1.5", "turns=1,2"} {
		if s, err := ParseSweep(text); err == nil {
			t.Errorf("%q is %+v", text, s)
		}
	}
}

// The page shows labels unchanged, labels both axes of each plot, and loads nothing.
func TestHTML(t *testing.T) {
	limits := Limits{TTFT: 150, ITL: 50, Total: 500}
	one, two := made(40, func(i int) float64 { return float64(100 + i) }, 10), made(40, flatly(130), 20)
	for _, r := range []*Result{one, two} {
		r.Run, r.Limits, r.Good, r.GoodRatio, r.Goodput = `<b>"&`, &limits, 3, .1, 2
	}
	empty := summarize(&Config{Label: "failed"}, []Sample{{Failure: "status 503", Total: 1}}, 0, 1e9)
	for name, r := range map[string]Report{
		"one":        {Title: "<b>", Facts: [][2]string{{"rate", "<b>"}}, Runs: []*Result{one}},
		"compared":   {Runs: []*Result{one, two}, Comparisons: []Comparison{Compare(one, two)}},
		"no answers": {Runs: []*Result{empty}},
	} {
		t.Run(name, func(t *testing.T) {
			var b strings.Builder
			if err := r.WriteHTML(&b); err != nil {
				t.Fatal(err)
			}
			for _, bad := range []string{"<script", "http:", "https:", "src=", "href=", "url(", "@import", "<b>", "NaN", "Inf", "%!", "ZgotmplZ"} {
				if strings.Contains(b.String(), bad) {
					t.Errorf("the page has %q", bad)
				}
			}
			want := 3
			if r.Limits() != nil {
				want = 4
			}
			if n := strings.Count(b.String(), "<svg"); n != want || n != strings.Count(b.String(), "</svg>") {
				t.Errorf("%d plots", n)
			}
			for _, svg := range strings.Split(b.String(), "<svg")[1:] {
				across, up := strings.Count(svg, `class="tick" text-anchor="middle"`), strings.Count(svg, `class="tick" text-anchor="end"`)
				if rows := strings.Contains(svg, `aria-label="Good`); across < 3 || up < 3 && !rows {
					t.Errorf("%d labels across and %d up in <svg%s", across, up, svg)
				}
			}
		})
	}
}
