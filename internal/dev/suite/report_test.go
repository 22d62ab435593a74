package main

import (
	"strings"
	"testing"
	"time"
)

// events are the output of go test -json for one package.
func events(lines ...string) string { return strings.Join(lines, "\n") + "\n" }

func TestReport(t *testing.T) {
	const (
		pass  = `{"Action":"pass","Package":"a","Test":"TestGood","Elapsed":1.5}`
		says  = `{"Action":"output","Package":"a","Test":"TestBad","Output":"    bad_test.go:7: it broke\n"}`
		fail  = `{"Action":"fail","Package":"a","Test":"TestBad","Elapsed":0.1}`
		why   = `{"Action":"output","Package":"a","Test":"TestGood/root","Output":"    good_test.go:9: needs root\n"}`
		done  = `{"Action":"output","Package":"a","Test":"TestGood/root","Output":"    --- SKIP: TestGood/root (0.00s)\n"}`
		skip  = `{"Action":"skip","Package":"a","Test":"TestGood/root"}`
		panik = `{"Action":"output","Package":"a","Test":"TestOpen","Output":"panic: oh\n"}`
		ok    = `{"Action":"pass","Package":"a","Elapsed":2}`
		bad   = `{"Action":"fail","Package":"a","Elapsed":2}`
		build = `{"Action":"build-output","ImportPath":"a","Output":"a.go:1: undefined: x\n"}`
		stops = `{"Action":"build-fail","ImportPath":"a"}`
	)
	for name, tt := range map[string]struct {
		events      string
		strict      bool
		ran, failed bool // expected results of the run
		good        bool // expected verdict on the run
		want        []string
	}{
		"good":       {events: events(pass, ok), ran: true, good: true, want: []string{"2.0 s  a\n", "1.5 s  a TestGood", "1 tests, 0 skipped"}},
		"skipped":    {events: events(why, done, skip, pass, ok), ran: true, good: true, want: []string{"skipped, needs root:\n           a TestGood/root\n", "1 tests, 1 skipped"}},
		"strict":     {events: events(why, done, skip, pass, ok), strict: true, ran: true, want: []string{"1 tests were skipped; this run may skip none"}},
		"failed":     {events: events(pass, says, fail, bad), ran: true, failed: true, want: []string{"a TestBad:\n    bad_test.go:7: it broke\n", "FAILED     a TestBad\n", "2 failures"}},
		"panic":      {events: events(pass, panik, bad), ran: true, failed: true, want: []string{"a TestOpen did not end:\npanic: oh\n", "FAILED     a\n"}},
		"not built":  {events: events(build, stops), failed: true, want: []string{"a.go:1: undefined: x\n", "FAILED     build of a\n"}},
		"no events":  {good: true, want: []string{"slowest 0 of 0 tests", "0 tests"}},
		"other text": {events: "go: downloading\n", good: true, want: []string{"go: downloading\n"}},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			r := newReport(&out)
			if ran, failed := r.read(strings.NewReader(tt.events), true); ran != tt.ran || failed != tt.failed {
				t.Errorf("ran %v, failed %v", ran, failed)
			}
			if good := r.finish(time.Second, tt.strict); good != tt.good {
				t.Errorf("good is %v", good)
			}
			for _, want := range tt.want {
				if !strings.Contains(out.String(), want) {
					t.Errorf("%q is missing in\n%s", want, out.String())
				}
			}
		})
	}
}

// TestSlowest: the report lists the ten slowest tests, without subtests.
func TestSlowest(t *testing.T) {
	var in, out strings.Builder
	for _, name := range "abcdefghijkl" {
		in.WriteString(`{"Action":"pass","Package":"p","Test":"Test_` + string(name) + `/sub","Elapsed":99}` + "\n")
		in.WriteString(`{"Action":"pass","Package":"p","Test":"Test_` + string(name) + `","Elapsed":` + string('1'+(name-'a')%9) + `}` + "\n")
	}
	r := newReport(&out)
	r.read(strings.NewReader(in.String()), true)
	r.finish(0, false)
	if n := strings.Count(out.String(), "p Test_"); n != slowest || strings.Contains(out.String(), "99.0") {
		t.Errorf("%d lines:\n%s", n, out.String())
	}
	first, _, _ := strings.Cut(out.String()[strings.Index(out.String(), "tests:\n")+7:], "\n")
	if !strings.HasSuffix(first, "9.0 s  p Test_i") {
		t.Errorf("the slowest is %q", first)
	}
}
