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
)

// divide splits the arguments of go test into flags and packages.
func divide(args []string) (flags, packages []string) {
	n := slices.IndexFunc(args, func(a string) bool { return !strings.HasPrefix(a, "-") })
	if n < 0 {
		return args, nil
	}
	return args[:n], args[n:]
}

// goTest runs one go test.
func goTest(r *report, args []string) {
	c := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	c.Stderr = os.Stderr
	events, write := io.Pipe()
	c.Stdout = write
	var ran, failed bool
	var wg sync.WaitGroup
	wg.Go(func() { ran, failed = r.read(events) })
	err := c.Run()
	write.Close()
	wg.Wait()
	switch {
	case failed: // which the report has
	case err != nil:
		r.broken(fmt.Errorf("go test: %w", err))
	case !ran:
		r.broken(errors.New("go test ran no test"))
	}
}

// shards are the shares of one package's tests, and the program that has them.
type shards struct {
	program, dir, path string
	tests              [][]string // names, one list for each process
	flags              []string   // of the program
}

// buildFlags are the flags of go test that are not for the program.
var buildFlags = regexp.MustCompile(`^--?(race|tags=.*|gcflags=.*|ldflags=.*|p=.*|vet=.*|trimpath)$`)

// chosen parses N:PACKAGE:PATTERN. The function says which tests the pattern chooses.
func chosen(split string) (n int, pkg string, choose func(string) bool, err error) {
	count, rest, _ := strings.Cut(split, ":")
	pkg, text, _ := strings.Cut(rest, ":")
	text, not := strings.CutPrefix(text, "!")
	pattern, err := regexp.Compile(text)
	if err != nil {
		return 0, "", nil, err
	}
	if n, err = strconv.Atoi(count); err != nil || n < 1 || pkg == "" {
		return 0, "", nil, fmt.Errorf("-split=%q: want N:PACKAGE:PATTERN", split)
	}
	return n, pkg, func(test string) bool { return pattern.MatchString(test) != not }, nil
}

// buildShards compiles the tests of a package into dir and divides those that split
// chooses.
func buildShards(split, dir string, flags []string) (*shards, error) {
	n, pkg, choose, err := chosen(split)
	if err != nil {
		return nil, err
	}
	out, err := output("go", "list", "-f", "{{.Dir}}\n{{.ImportPath}}", pkg)
	if err != nil {
		return nil, err
	}
	s := &shards{program: filepath.Join(dir, "shard.test"), tests: make([][]string, n)}
	s.dir, s.path, _ = strings.Cut(strings.TrimSpace(out), "\n")
	compile := []string{"test", "-c", "-o", s.program}
	for _, f := range flags {
		if buildFlags.MatchString(f) {
			compile = append(compile, f)
		} else {
			s.flags = append(s.flags, "-test."+strings.TrimLeft(f, "-"))
		}
	}
	if _, err := output("go", append(compile, pkg)...); err != nil {
		return nil, err
	}
	names, err := output(s.program, "-test.list=^Test")
	if err != nil {
		return nil, err
	}
	i := 0
	for name := range strings.Lines(names) {
		if name = strings.TrimSpace(name); choose(name) {
			s.tests[i%n] = append(s.tests[i%n], name)
			i++
		}
	}
	if i < n {
		return nil, fmt.Errorf("-split=%q chooses %d tests", split, i)
	}
	return s, nil
}

// output runs a command and returns what it prints; its error has what it said.
func output(name string, args ...string) (string, error) {
	c := exec.Command(name, args...)
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr = &stdout, &stderr
	if err := c.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s%s", name, strings.Join(args, " "), err, stdout.Bytes(), stderr.Bytes())
	}
	return stdout.String(), nil
}

// run runs every share at once.
func (s *shards) run(r *report) {
	var wg sync.WaitGroup
	for _, tests := range s.tests {
		wg.Go(func() {
			if err := s.share(r, tests); err != nil {
				r.broken(fmt.Errorf("%s: %w", s.path, err))
			}
		})
	}
	wg.Wait()
}

// share runs some of the tests; the go command turns what they print into events.
func (s *shards) share(r *report, tests []string) error {
	c := exec.Command(s.program, append([]string{"-test.v=test2json", "-test.run=^(" + strings.Join(tests, "|") + ")$"}, s.flags...)...)
	c.Dir = s.dir
	convert := exec.Command("go", "tool", "test2json", "-t", "-p", s.path)
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
	wg.Go(func() { ran, failed = r.read(events) })
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
