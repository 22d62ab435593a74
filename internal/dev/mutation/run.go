package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// job is one run of tests, with a mutant or without any.
type job struct {
	m        *mutant // nil: the unmodified sources
	file     sourceFile
	packages []string
	tests    string // pattern for -run; "" for all
}

// outcome is the result of a run.
type outcome struct {
	killer string // the test that failed, or the package when the failure is of no test; "" if all passed
	took   time.Duration
	err    error // the run has no result: the program did not compile, or no test ran
}

// prepare finds the file that a mutant changes and the tests that have to fail.
func prepare(s *sources, c *checker, m *mutant) (*job, error) {
	file, err := s.find(m.old)
	if err != nil {
		return nil, err
	}
	j := &job{m: m, file: file, packages: s.testers(file.pkg, m.tests)}
	if err := c.compiles(s, file, j.text()); err != nil {
		return nil, err
	}
	if m.tests != nil {
		j.tests = m.tests.String()
	}
	if len(j.packages) == 0 {
		return nil, fmt.Errorf("no test of a package that links %s has a name like %s", file.pkg.ImportPath, j.tests)
	}
	return j, nil
}

// text is the mutated file.
func (j *job) text() string { return strings.Replace(j.file.text, j.m.old, j.m.new, 1) }

// baseline returns the same run without the mutant.
func (j *job) baseline() job { return job{packages: j.packages, tests: j.tests} }

// key identifies the tests of a job.
func (j *job) key() string { return strings.Join(j.packages, " ") + " " + j.tests }

// run runs the tests in the module at dir. Temporary files are in scratch. No file of
// the module changes: the compiler reads the mutated file through an overlay.
func (j *job) run(dir, scratch string, limit time.Duration) outcome {
	args := []string{"test", "-json", "-vet=off", "-failfast", "-timeout=" + limit.String()}
	if j.m != nil {
		overlay, err := j.overlay(scratch)
		if err != nil {
			return outcome{err: err}
		}
		args = append(args, "-overlay="+overlay)
	}
	if j.tests != "" {
		args = append(args, "-run="+j.tests)
	}
	began := time.Now()
	o := watch(dir, append(args, j.packages...))
	o.took = time.Since(began)
	return o
}

// watch runs the go command until it ends, or until a test has failed.
func watch(dir string, args []string) (o outcome) {
	test := exec.Command("go", args...)
	test.Dir, test.SysProcAttr = dir, &syscall.SysProcAttr{Setpgid: true}
	var complaint bytes.Buffer
	test.Stderr = &complaint
	events, err := test.StdoutPipe()
	if err != nil {
		return outcome{err: err}
	}
	if err := test.Start(); err != nil {
		return outcome{err: err}
	}
	o = firstFailure(events)
	if o.killer != "" {
		_ = syscall.Kill(-test.Process.Pid, syscall.SIGKILL) // includes the test programs; it may have ended
	}
	_, _ = io.Copy(io.Discard, events)
	if err := test.Wait(); err != nil && o.killer == "" && o.err == nil {
		o.err = fmt.Errorf("go test: %w\n%s", err, complaint.Bytes())
	}
	return o
}

// overlay writes the mutated file and the list that puts it in place of the original.
func (j *job) overlay(scratch string) (path string, err error) {
	dir, err := os.MkdirTemp(scratch, "mutant")
	if err != nil {
		return "", err
	}
	mutated := filepath.Join(dir, filepath.Base(j.file.path))
	if err := os.WriteFile(mutated, []byte(j.text()), 0o600); err != nil {
		return "", err
	}
	list, err := json.Marshal(map[string]map[string]string{"Replace": {j.file.path: mutated}})
	if err != nil {
		return "", err
	}
	path = filepath.Join(dir, "overlay.json")
	return path, os.WriteFile(path, list, 0o600)
}

// event is one line of go test -json.
type event struct {
	Action      string
	Package     string
	Test        string
	Output      string
	FailedBuild string
}

// firstFailure reads the events of a run up to the first failure.
func firstFailure(events io.Reader) (o outcome) {
	ran := false
	var build strings.Builder
	for lines := bufio.NewReader(events); ; {
		line, err := lines.ReadBytes('\n')
		if err != nil { // the end
			break
		}
		var e event
		if json.Unmarshal(line, &e) != nil {
			continue // output of the go command itself
		}
		ran = ran || e.Test != ""
		switch {
		case e.Action == "build-output":
			build.WriteString(e.Output)
		case e.Action != "fail":
		case e.FailedBuild != "":
			return outcome{err: fmt.Errorf("it does not compile:\n%s", build.String())}
		default:
			return outcome{killer: cmp.Or(e.Test, e.Package)}
		}
	}
	if !ran {
		return outcome{err: errors.New("no test ran")}
	}
	return outcome{}
}
