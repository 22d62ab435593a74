package replay

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"io"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
)

func sampleReport(t *testing.T, names ...string) *Report {
	t.Helper()
	l := newLab(t, fleet(t), mooncake(t))
	var results []*Result
	for _, name := range names {
		results = append(results, l.Run(name, decider(anywhere)))
	}
	return l.Report(results)
}

// The keys that checks use. No value may be invalid in JSON.
func TestReportIsJSON(t *testing.T) {
	text, err := json.Marshal(sampleReport(t, "a", "b"))
	if err != nil {
		t.Fatal(err)
	}
	var r struct {
		Trace string           `json:"trace"`
		Ideal float64          `json:"ideal_hit_ratio"`
		Rows  []map[string]any `json:"rows"`
	}
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	if r.Trace != "mooncake_300.jsonl" || math.Abs(r.Ideal-676.0/8490) > 1e-12 || len(r.Rows) != 2 {
		t.Errorf("%s", text)
	}
	for _, key := range []string{
		"requests", "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "itl_p50_ms", "throughput_rps", "goodput_rps",
		"hit_ratio", "load_cv", "load_max_min", "decisions_per_s",
	} {
		if v, ok := r.Rows[1][key].(float64); !ok || v <= 0 {
			t.Errorf("%s is %v", key, r.Rows[1][key])
		}
	}
	if r.Rows[0]["policy"] != "a" || r.Rows[1]["policy"] != "b" {
		t.Error("the rows are not in the order of the policies")
	}
}

// Computes the figures of a row again from the events.
func TestRow(t *testing.T) {
	l := newLab(t, fleet(t), mooncake(t))
	r := l.play(decider(anywhere))
	row := l.result("anywhere", r).Row
	var ttft []float64
	good, last := 0, 0.0
	for i := range r.jobs {
		j := &r.jobs[i]
		first := (j.first - j.arrived).Seconds()
		ttft = append(ttft, first)
		if first <= 4 && (j.OutputLength == 1 || (j.ended-j.first).Seconds()/float64(j.OutputLength-1) <= .04) {
			good++
		}
		last = max(last, j.ended.Seconds())
	}
	slices.Sort(ttft)
	near := func(what string, got, want float64) {
		t.Helper()
		if math.Abs(got-want) > 1e-6*max(1, want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	near("p50", row.TTFTP50, 1000*ttft[149])
	near("p95", row.TTFTP95, 1000*ttft[284])
	near("p99", row.TTFTP99, 1000*ttft[296])
	near("throughput", row.Throughput, 300/last)
	near("goodput", row.Goodput, float64(good)/last)
	near("hit ratio", row.HitRatio, float64(r.hits)/8490)
	if row.HitRatio <= 0 || row.HitRatio >= l.trace.IdealHitRatio || good == 0 || good == 300 {
		t.Errorf("a case that shows little: %+v", row)
	}
}

func TestSpread(t *testing.T) {
	for _, tt := range []struct {
		counts     []int
		cv, maxMin float64
	}{
		{[]int{5, 5, 5}, 0, 1},
		{[]int{1, 3}, .5, 3},
		{[]int{0, 8}, 1, 8},
		{[]int{0, 0}, 0, 0},
	} {
		if cv, maxMin := spread(tt.counts); math.Abs(cv-tt.cv) > 1e-12 || maxMin != tt.maxMin {
			t.Errorf("%v: spread(tt.counts) = %v, %v", tt.counts, cv, maxMin)
		}
	}
}

// Each token counts, not each step.
func TestBetween(t *testing.T) {
	steps := []weighted{{30 * time.Millisecond, 1}, {10 * time.Millisecond, 50}, {20 * time.Millisecond, 49}, {time.Second, 0}}
	if p50, p99 := between(steps); p50 != 10 || p99 != 20 {
		t.Errorf("between(steps) = %v, %v, want 10, 20", p50, p99)
	}
	if p50, p99 := between([]weighted{{time.Second, 0}}); p50 != 0 || p99 != 0 {
		t.Errorf("between = %v, %v, want 0, 0", p50, p99)
	}
}

func TestTable(t *testing.T) {
	r := sampleReport(t, "a", "b")
	r.Rows[1].Fallbacks = 3
	var b strings.Builder
	if err := r.WriteTable(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"300 requests", "ideal hit ratio 0.0796", "decisions/s", "b left 3 of 300 decisions"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}

// The page is complete, shows a policy's name unchanged, labels each axis, and loads nothing.
func TestHTML(t *testing.T) {
	for name, reports := range map[string][]*Report{
		"two policies": {sampleReport(t, "a", `<b>"&`)},
		"two traces":   {sampleReport(t, "a"), sampleReport(t, "b")},
	} {
		t.Run(name, func(t *testing.T) {
			var b bytes.Buffer
			if err := WriteHTML(&b, reports); err != nil {
				t.Fatal(err)
			}
			checkPage(t, b.String(), 4*len(reports))
		})
	}
}

// checkPage fails the test unless a page has that many complete plots with labeled axes and loads nothing.
func checkPage(t *testing.T, text string, plots int) {
	t.Helper()
	for _, bad := range []string{"<script", "http:", "https:", "src=", "href=", "url(", "@import", "<b>", "NaN", "Inf", "%!", "ZgotmplZ"} {
		if strings.Contains(text, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	if n := strings.Count(text, "<svg"); n != plots {
		t.Errorf("got %d plots", n)
	}
	for rest := text; ; {
		_, svg, ok := strings.Cut(rest, "<svg")
		if !ok {
			break
		}
		svg, rest, _ = strings.Cut(svg, "</svg>")
		if n := strings.Count(svg, `class="tick" text-anchor="middle"`); n < 3 {
			t.Errorf("%d labels on the axis of <svg%s", n, svg)
		}
		d := xml.NewDecoder(strings.NewReader("<svg" + svg + "</svg>"))
		for {
			if _, err := d.Token(); err == io.EOF {
				break
			} else if err != nil {
				t.Fatalf("plot: %v", err)
			}
		}
	}
}
