package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// group holds the arguments of one go test.
type group struct {
	split           int // number of processes; 0: one for each package
	flags, packages []string
}

// groups parses the arguments.
func groups(args []string) []group {
	all := []group{{}}
	for _, a := range args {
		g := &all[len(all)-1]
		n, split := strings.CutPrefix(a, "-split=")
		switch {
		case a == "--":
			all = append(all, group{})
		case split:
			if g.split, _ = strconv.Atoi(n); g.split < 1 {
				g.split = 1
			}
		case strings.HasPrefix(a, "-"):
			g.flags = append(g.flags, a)
		default:
			g.packages = append(g.packages, a)
		}
	}
	return all
}

// build returns the flags of the group that require a separate compilation.
func (g group) build() string {
	var flags []string
	for _, f := range g.flags {
		if name, _, _ := strings.Cut(strings.TrimLeft(f, "-"), "="); buildFlags.MatchString(name) && name != "vet" {
			flags = append(flags, f)
		}
	}
	return strings.Join(flags, " ")
}

// goTest runs one go test.
func goTest(r *report, g group) {
	c := exec.Command("go", slices.Concat([]string{"test", "-json"}, g.flags, g.packages)...)
	c.Stderr = os.Stderr
	events, write := io.Pipe()
	c.Stdout = write
	var ran, failed bool
	var wg sync.WaitGroup
	wg.Go(func() { ran, failed = r.read(events, true) })
	err := c.Run()
	write.Close()
	wg.Wait()
	switch {
	case failed: // the report has it
	case err != nil:
		r.broken(fmt.Errorf("go test: %w", err))
	case !ran:
		r.broken(errors.New("go test ran no test"))
	}
}

// shards are the shares of one package's tests, and the test program.
type shards struct {
	program, dir, path string
	converter          string     // the program test2json; "go tool" takes longer to find it than it runs
	processes          int        // at the same time
	tests              [][]string // names, each list for one process
	flags              []string   // of the program
}

// share is the approximate number of tests of a process. Small shares spread
// long tests over the processes. With smaller ones, starting processes would
// take longer than the tests.
const share = 4

// buildFlags are the flags of go test that the test program does not accept.
var buildFlags = regexp.MustCompile(`^(race|tags|gcflags|ldflags|p|vet|trimpath)$`)

// buildShards compiles the tests of a group's package into dir and divides the
// tests that its flags select.
func buildShards(g group, dir string) (*shards, error) {
	if len(g.packages) != 1 {
		return nil, fmt.Errorf("-split: want one package, not %q", g.packages)
	}
	out, err := output("go", "list", "-f", "{{.Dir}}\n{{.ImportPath}}", g.packages[0])
	if err != nil {
		return nil, err
	}
	s := &shards{processes: g.split}
	s.dir, s.path, _ = strings.Cut(strings.TrimSpace(out), "\n")
	s.program = filepath.Join(dir, strings.ReplaceAll(s.path, "/", "_"))
	compile := []string{"test", "-c", "-o", s.program}
	run, skip := regexp.MustCompile("^Test"), regexp.MustCompile("^$")
	for _, f := range g.flags {
		switch name, value, _ := strings.Cut(strings.TrimLeft(f, "-"), "="); {
		case buildFlags.MatchString(name):
			compile = append(compile, f)
		case name == "run":
			run, err = regexp.Compile(value)
		case name == "skip":
			skip, err = regexp.Compile(value)
		default:
			s.flags = append(s.flags, "-test."+strings.TrimLeft(f, "-"))
		}
		if err != nil {
			return nil, err
		}
	}
	if _, err := output("go", append(compile, s.path)...); err != nil {
		return nil, err
	}
	if out, err = output("go", "tool", "-n", "test2json"); err != nil { // builds test2json, if needed
		return nil, err
	}
	s.converter = strings.TrimSpace(out)
	names, err := output(s.program, "-test.list=^Test")
	if err != nil {
		return nil, err
	}
	var tests []string
	for name := range strings.Lines(names) {
		if name = strings.TrimSpace(name); run.MatchString(name) && !skip.MatchString(name) {
			tests = append(tests, name)
		}
	}
	if len(tests) == 0 {
		return nil, fmt.Errorf("-split: no test of %s is chosen", s.path)
	}
	s.tests = make([][]string, (len(tests)+share-1)/share) // neighbours of a file in different ones
	for n, name := range tests {
		s.tests[n%len(s.tests)] = append(s.tests[n%len(s.tests)], name)
	}
	return s, nil
}

// output runs a command and returns its output; an error contains the output.
func output(name string, args ...string) (string, error) {
	c := exec.Command(name, args...)
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr = &stdout, &stderr
	if err := c.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s%s", name, strings.Join(args, " "), err, stdout.Bytes(), stderr.Bytes())
	}
	return stdout.String(), nil
}

// run runs all tests.
func (s *shards) run(r *report) {
	start := time.Now()
	next := make(chan []string, len(s.tests))
	for _, tests := range s.tests {
		next <- tests
	}
	close(next)
	var wg sync.WaitGroup
	for range s.processes {
		wg.Go(func() {
			for tests := range next {
				if err := s.process(r, tests); err != nil {
					r.broken(fmt.Errorf("%s: %w", s.path, err))
				}
			}
		})
	}
	wg.Wait()
	r.done(fmt.Sprintf("%s (in %d processes)", s.path, s.processes), time.Since(start))
}

// process runs some of the tests; the converter turns their output into events.
func (s *shards) process(r *report, tests []string) error {
	c := exec.Command(s.program, append([]string{"-test.v=test2json", "-test.run=^(" + strings.Join(tests, "|") + ")$"}, s.flags...)...)
	c.Dir = s.dir
	convert := exec.Command(s.converter, "-t", "-p", s.path)
	convert.Stderr = os.Stderr
	text, err := convert.StdinPipe()
	if err != nil {
		return err
	}
	events, err := convert.StdoutPipe()
	if err != nil {
		return err
	}
	if err := convert.Start(); err != nil {
		return err
	}
	c.Stdout, c.Stderr = text, text
	var ran, failed bool
	var wg sync.WaitGroup
	wg.Go(func() { ran, failed = r.read(events, false) })
	err = c.Run()
	text.Close()
	wg.Wait()
	switch converted := convert.Wait(); {
	case failed:
		return nil // the report has it
	case err != nil:
		return err
	case converted != nil:
		return converted
	case !ran:
		return errors.New("no test ran")
	}
	return nil
}
