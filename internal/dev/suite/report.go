package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// slowest is the number of slowest tests that the report lists.
const slowest = 10

// event is one line of go test -json (go doc test2json).
type event struct {
	Action, Package, ImportPath, Test, Output string
	Elapsed                                   float64 // seconds
}

// key names a test; without a name it means the package itself.
type key struct{ pkg, test string }

// report holds the results of several go tests that run at the same time.
type report struct {
	mu     sync.Mutex
	w      io.Writer
	times  map[key]float64 // of top-level tests, in seconds
	failed []string
	skips  map[string][]string // tests by reason
}

func newReport(w io.Writer) *report {
	return &report{w: w, times: make(map[key]float64), skips: make(map[string][]string)}
}

// broken records that tests could not run.
func (r *report) broken(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = append(r.failed, err.Error())
}

// stream is the output of one go test.
type stream struct {
	*report
	output map[key][]string // of running tests, and of packages
	whole  bool             // it contains all tests of a package
	ran    bool             // a test has ended
	bad    bool             // a test or a package has failed
}

// done prints the line of a package.
func (r *report) done(pkg string, took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintf(r.w, "%7.1f s  %s\n", took.Seconds(), pkg)
}

// read handles the events of one go test, of whole packages or of some tests of
// one package, until they end. It reports whether a test ended, and whether one
// failed.
func (r *report) read(events io.Reader, whole bool) (ran, failed bool) {
	s := stream{report: r, output: make(map[key][]string), whole: whole}
	lines := bufio.NewReader(events)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			s.line(line)
		}
		if err != nil {
			return s.ran, s.bad
		}
	}
}

// line handles one line of output.
func (s *stream) line(text []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var e event
	if json.Unmarshal(text, &e) != nil || e.Action == "" {
		fmt.Fprintln(s.w, strings.TrimSuffix(string(text), "\n"))
		return
	}
	k := key{e.Package, e.Test}
	switch e.Action {
	case "output":
		s.output[k] = append(s.output[k], e.Output)
	case "build-output":
		fmt.Fprint(s.w, e.Output)
	case "build-fail":
		s.fail("build of " + e.ImportPath)
	case "pass", "fail", "skip":
		if e.Test == "" {
			s.endPackage(e)
		} else {
			s.endTest(k, e)
		}
		delete(s.output, k)
	}
}

func (s *stream) fail(what string) {
	s.bad = true
	s.failed = append(s.failed, what)
}

// endTest handles the end of a test or of a subtest.
func (s *stream) endTest(k key, e event) {
	s.ran = true
	name := k.pkg + " " + k.test
	switch e.Action {
	case "fail":
		fmt.Fprintf(s.w, "%s:\n%s", name, strings.Join(s.output[k], ""))
		s.fail(name)
	case "skip":
		why := reason(s.output[k])
		s.skips[why] = append(s.skips[why], name)
	}
	if !strings.Contains(k.test, "/") {
		s.times[k] = e.Elapsed
	}
}

// endPackage prints the line of a package. If it failed, it prints the
// process's output outside of tests, and that of tests that did not end.
func (s *stream) endPackage(e event) {
	switch e.Action {
	case "pass":
		if s.whole {
			fmt.Fprintf(s.w, "%7.1f s  %s\n", e.Elapsed, e.Package)
		}
	case "fail":
		for _, open := range slices.SortedFunc(maps.Keys(s.output), func(a, b key) int { return cmp.Compare(a.test, b.test) }) {
			if open.pkg == e.Package && open.test != "" {
				fmt.Fprintf(s.w, "%s %s did not end:\n%s", open.pkg, open.test, strings.Join(s.output[open], ""))
			}
		}
		fmt.Fprint(s.w, strings.Join(s.output[key{e.Package, ""}], ""))
		s.fail(e.Package)
	}
}

var where = regexp.MustCompile(`^\s*\w+_test\.go:\d+: `)

// reason returns the text of a skipped test.
func reason(output []string) string {
	for _, line := range slices.Backward(output) {
		if at := where.FindStringIndex(line); at != nil {
			return strings.TrimSpace(line[at[1]:])
		}
	}
	return "no reason given"
}

// finish prints the summary, and reports whether the run is good. A strict run
// allows no skipped test.
func (r *report) finish(took time.Duration, strict bool) bool {
	fmt.Fprintf(r.w, "\nslowest %d of %d tests:\n", min(slowest, len(r.times)), len(r.times))
	byTime := slices.SortedFunc(maps.Keys(r.times), func(a, b key) int {
		return cmp.Or(cmp.Compare(r.times[b], r.times[a]), cmp.Compare(a.pkg, b.pkg), cmp.Compare(a.test, b.test))
	})
	for _, k := range byTime[:min(slowest, len(byTime))] {
		fmt.Fprintf(r.w, "%7.1f s  %s %s\n", r.times[k], k.pkg, k.test)
	}
	skipped := 0
	for _, why := range slices.Sorted(maps.Keys(r.skips)) {
		skipped += len(r.skips[why])
		fmt.Fprintf(r.w, "skipped, %s:\n", why)
		for _, t := range slices.Sorted(slices.Values(r.skips[why])) {
			fmt.Fprintf(r.w, "           %s\n", t)
		}
	}
	if strict && skipped > 0 {
		r.failed = append(r.failed, fmt.Sprintf("%d tests were skipped; this run may skip none", skipped))
	}
	for _, f := range r.failed {
		fmt.Fprintf(r.w, "FAILED     %s\n", f)
	}
	fmt.Fprintf(r.w, "%d tests, %d skipped with subtests, %d failures, %s\n", len(r.times), skipped, len(r.failed), took.Round(time.Second))
	return len(r.failed) == 0
}
