package main

import (
	"math"
	"strings"
	"testing"
)

func TestInterval(t *testing.T) {
	same := make([]float64, leastRounds)
	for i := range same {
		same[i] = 1.5
	}
	if median, from, to := interval(same); median != 1.5 || from != 1.5 || to != 1.5 {
		t.Errorf("got %v, %v to %v", median, from, to)
	}
	// The interval of a sample of the normal distribution is about that of its mean, 2.576 times its
	// standard deviation, and one round with another load changes it little.
	var sample []float64
	for i := range 39 {
		sample = append(sample, 1+0.05*math.Sqrt2*math.Erfinv(float64(i-19)/20))
	}
	median, from, to := interval(sample)
	if want := 2.576 * 0.05 / math.Sqrt(39); math.Abs(median-1) > 0.002 || math.Abs((to-from)/2-want) > 0.3*want {
		t.Errorf("got %v, %v to %v, want a half of %v", median, from, to, want)
	}
	if m, f, u := interval(append(sample, 9)); math.Abs(m-median) > 0.005 || math.Abs(f-from) > 0.005 || math.Abs(u-to) > 0.01 {
		t.Errorf("with a disturbed round %v, %v to %v", m, f, u)
	}
}

func TestJudge(t *testing.T) {
	c := &checker{threshold: 0.03}
	alternating := func(n int, a, b float64) (ratios []float64) {
		for i := range n {
			ratios = append(ratios, []float64{a, b}[i%2])
		}
		return ratios
	}
	for _, tt := range []struct {
		name   string
		ratios []float64
		want   string
		sure   bool
	}{
		{"few rounds", alternating(leastRounds-1, 2, 2), unclear, false},
		{"slower", alternating(8, 1.1, 1.2), slower, true},
		{"faster", alternating(8, 0.8, 0.9), faster, true},
		{"equal", alternating(8, 0.99, 1.01), equal, true},
		{"a small change", alternating(8, 1.01, 1.02), equal, true},
		{"noise", alternating(8, 0.8, 1.25), unclear, false},
	} {
		r := &checkRow{}
		for _, ratio := range tt.ratios {
			r.rounds = append(r.rounds, [2]figures{{cpu: 10}, {cpu: 10 * ratio}})
		}
		if got, sure := c.judge(r); got != tt.want || sure != tt.sure {
			t.Errorf("%s: got %s, %t", tt.name, got, sure)
		}
	}
}

// TestPrintCheck: a row that is slower is an error, and each row has its verdict.
func TestPrintCheck(t *testing.T) {
	row := func(name string, cpu float64) *checkRow {
		r := &checkRow{name: name}
		for range leastRounds {
			r.rounds = append(r.rounds, [2]figures{{cpu: 20, calls: 5}, {cpu: cpu, calls: 6}})
		}
		return r
	}
	for _, tt := range []struct {
		cpu  float64
		line string
		err  error
	}{{30, "+50.0 % (+50.0 to +50.0)  slower", errSlower}, {20, "equal", nil}, {15, "faster", nil}} {
		var out strings.Builder
		err := (&checker{threshold: 0.03, rows: []*checkRow{row("a", 20), row("b", tt.cpu)}}).print(&out, "base")
		if err != tt.err || !strings.Contains(out.String(), tt.line) || !strings.Contains(out.String(), "5.0 6.0") {
			t.Errorf("%v µs: %v\n%s", tt.cpu, err, out.String())
		}
	}
}

func TestParsePerf(t *testing.T) {
	const out = "1234,,raw_syscalls:sys_enter,99,100.00,,\n<not supported>,,instructions,0,100.00,,\n"
	if n := parsePerf(out, "raw_syscalls:sys_enter"); n != 1234 {
		t.Errorf("got %v calls", n)
	}
	if n := parsePerf(out, "instructions"); n != 0 {
		t.Errorf("got %v instructions", n)
	}
}
