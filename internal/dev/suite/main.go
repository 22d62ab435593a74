// Command suite runs tests with the go command and prints one report of them: a
// line for each package, the output of the tests that failed, the slowest ten
// tests, and each reason for which a test was skipped.
//
//	suite [-strict] ARGUMENTS... [-- ARGUMENTS...]...
//
// Each group of arguments is for one go test, and the groups run at the same time. A
// flag with a value is one argument (-timeout=10m), and the flags come first.
//
//   - -strict: a skipped test fails the run.
//   - -split=N, in a group with one package: its tests run in N processes, each with
//     its share of the tests that -run and -skip choose. That is for a package whose
//     tests mostly wait.
//
// The exit code is 0 only if every group ran tests and every test passed.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"
)

func main() {
	ok, err := suite(os.Stdout, os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "suite:", err)
	}
	if !ok {
		os.Exit(1)
	}
}

// suite runs the tests, and reports whether all passed.
func suite(w io.Writer, args []string) (bool, error) {
	start := time.Now()
	strict := len(args) > 0 && args[0] == "-strict"
	if strict {
		args = args[1:]
	}
	dir, err := os.MkdirTemp("", "suite")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(dir)
	r, all := newReport(w), groups(args)
	// Groups with the same build flags wait for a program of shards, so that no package
	// is compiled twice at the same time.
	builds := map[string]*sync.WaitGroup{}
	for _, g := range all {
		if len(g.packages) == 0 {
			return false, errors.New("a group of arguments names no package")
		}
		if builds[g.build()] == nil {
			builds[g.build()] = new(sync.WaitGroup)
		}
		if g.split > 0 {
			builds[g.build()].Add(1)
		}
	}
	var wg sync.WaitGroup
	for n, g := range all {
		wg.Go(func() {
			built := builds[g.build()]
			if g.split == 0 {
				built.Wait()
				goTest(r, g)
				return
			}
			s, err := buildShards(g, filepath.Join(dir, strconv.Itoa(n)))
			built.Done()
			if err != nil {
				r.broken(err)
				return
			}
			s.run(r)
		})
	}
	wg.Wait()
	return r.finish(time.Since(start), strict), nil
}
