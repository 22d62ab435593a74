package loadgen

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
)

// made returns a run whose n requests have the given time to first token and gap, in ms.
func made(n int, first func(i int) float64, gap float64) *Result {
	var samples []Sample
	for i := range n {
		f := first(i)
		samples = append(samples, Sample{Request: i, Scheduled: float64(10 * i), First: f, Gaps: []float64{gap, gap}, Total: f + 2*gap, Output: 3})
	}
	return summarize(&Config{}, samples, 0, 1e9)
}

func flatly(ms float64) func(int) float64 { return func(int) float64 { return ms } }

func difference(t *testing.T, c Comparison, name string) Difference {
	t.Helper()
	for _, d := range c.Differences {
		if d.Name == name {
			return d
		}
	}
	t.Fatalf("no %s in %+v", name, c)
	return Difference{}
}

func TestCompareArithmetic(t *testing.T) {
	// Constant times: the interval is the change.
	c := Compare(made(100, flatly(100), 10), made(50, flatly(150), 10))
	for _, name := range []string{"TTFT mean", "TTFT p50", "TTFT p99"} {
		d := difference(t, c, name)
		if d.A != 100 || d.B != 150 || math.Abs(*d.Change-.5) > 1e-12 || math.Abs(d.Interval[0]-.5) > 1e-12 || math.Abs(d.Interval[1]-.5) > 1e-12 || d.Verdict != VerdictHigher {
			t.Errorf("%+v", d)
		}
	}
	if d := difference(t, c, "TPOT p50"); d.A != 10 || *d.Change != 0 || d.Verdict != VerdictSame {
		t.Errorf("%+v", d)
	}
	if d := difference(t, c, "requests/s"); d.A != 100 || d.B != 50 || *d.Change != -.5 || d.Interval != nil || d.Verdict != VerdictNone {
		t.Errorf("%+v", d)
	}
	if d := difference(t, Compare(made(50, flatly(150), 10), made(50, flatly(100), 10)), "TTFT p95"); d.Verdict != VerdictLower {
		t.Errorf("%+v", d)
	}
}

// The interval of a mean is that of the textbook where requests are independent.
func TestCompareInterval(t *testing.T) {
	values := func(seed int) func(int) float64 {
		return func(i int) float64 { return 100 + 50*float64(mix(uint64(i+1000*seed))%1000)/1000 }
	}
	a, b := made(400, values(1), 10), made(400, values(2), 10)
	d := difference(t, Compare(a, b), "TTFT mean")
	if d.Verdict != VerdictSame || d.Interval[0] >= *d.Change || d.Interval[1] <= *d.Change {
		t.Errorf("%+v", d)
	}
	// Uniform values of width 50 have the standard deviation 14.4; the difference of two
	// means of 400 has 1.02, which is 0.82 % of 125. The interval has 2 × 1.96 of it.
	if width := d.Interval[1] - d.Interval[0]; width < .024 || width > .041 {
		t.Errorf("the interval has the width %.4f", width)
	}
	again := difference(t, Compare(a, b), "TTFT mean")
	if *again.Interval != *d.Interval {
		t.Error("the same runs gave another interval")
	}
}

func TestCompareFew(t *testing.T) {
	if d := difference(t, Compare(made(leastRequests-1, flatly(1), 1), made(100, flatly(2), 1)), "TTFT p50"); d.Interval != nil || d.Verdict != VerdictNone || *d.Change != 1 {
		t.Errorf("%+v", d)
	}
	failed := summarize(&Config{}, []Sample{{Failure: "x", Total: 1}}, 0, 1e9)
	if d := difference(t, Compare(failed, made(100, flatly(2), 1)), "TTFT p50"); d.Change != nil || d.Verdict != VerdictNone {
		t.Errorf("%+v", d)
	}
}

func TestCompareRuns(t *testing.T) {
	labelled := func(label string) *Result {
		r := made(3, flatly(1), 1)
		r.Run = label
		return r
	}
	one, two, three := labelled("rate=1"), labelled("rate=2"), labelled("rate=3")
	if c, err := CompareRuns([]*Result{one}, []*Result{two}); err != nil || len(c) != 1 || c[0].Run != "" {
		t.Errorf("%+v %v", c, err)
	}
	if c, err := CompareRuns([]*Result{one, two}, []*Result{two, three}); err != nil || len(c) != 1 || c[0].Run != "rate=2" {
		t.Errorf("%+v %v", c, err)
	}
	if _, err := CompareRuns([]*Result{one, two}, []*Result{three}); err == nil {
		t.Error("no run occurs in both")
	}
}

// The lines of a run in simulated time are those of the file, and give the same result.
func TestSamples(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{answers: func(n int) (int, []string) {
			if n == 1 {
				return 503, nil
			}
			return 200, good()
		}}
		c := config(s)
		c.Requests, c.Concurrency, c.Label, c.Limits = 3, 1, "rate=1", Limits{TTFT: 1000, ITL: 45}
		r := measure(t, s, c)
		var b bytes.Buffer
		if err := r.WriteSamples(&b); err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(filepath.Join("testdata", "samples.jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		if b.String() != string(want) {
			t.Errorf("the lines are\n%s", b.String())
		}
		// A token takes 400 ms / 9.
		if r.Good != 2 || r.GoodRatio != 2./3 || r.Goodput != 2/2.8 {
			t.Errorf("%+v", r)
		}
		runs, err := ReadRuns(&b, c.Limits)
		if err != nil || len(runs) != 1 {
			t.Fatal(err)
		}
		if got := runs[0]; got.TTFT != r.TTFT || got.TPOT != r.TPOT || got.ITL != r.ITL || got.Late != r.Late || got.Goodput != r.Goodput || got.Run != "rate=1" || got.Failures["status 503"] != 1 {
			t.Errorf("%+v\n%+v", got, r)
		}
	})
}

func TestReadRunsRefuses(t *testing.T) {
	for _, text := range []string{"", "x", "\n{}", `{"e2e_ms":1,"ttft_ms":2}`, `{"e2e_ms":1,"scheduled_ms":-2}`, strings.Repeat("[", 99)} {
		if r, err := ReadRuns(strings.NewReader(text), Limits{}); err == nil {
			t.Errorf("%q is %+v", text, r)
		}
	}
}

func FuzzReadRuns(f *testing.F) {
	f.Add(`{"request":0,"e2e_ms":5,"ttft_ms":2,"itl_ms":[1,2],"output_tokens":3}` + "\n" + `{"run":"a","e2e_ms":1,"failure":"x"}`)
	f.Fuzz(func(t *testing.T, text string) {
		runs, err := ReadRuns(strings.NewReader(text), Limits{TTFT: 1})
		if err == nil && len(runs) == 0 {
			t.Error("no runs and no error")
		}
		for _, r := range runs {
			if r.Requests == 0 || r.Failed > r.Requests {
				t.Errorf("%+v", r)
			}
		}
	})
}
