// Command suite runs tests by the go command and prints one report of them: a
// line for each package, the output of the tests that failed, the slowest ten
// tests, and each reason for which a test was skipped.
//
//	suite [-strict] [-split N:PACKAGE[:[!]PATTERN]] -- ARGUMENTS...
//
// The arguments are those of go test; a flag with a value is one argument
// (-timeout=10m). With -split the tests of one more package run at the same time
// in N processes, each with its share of the tests, under the same flags: for a
// package whose tests mostly wait. The pattern is a regular expression that chooses
// tests by name; with a "!" it leaves them out. With -strict a skipped test fails the
// run.
//
// The exit code is 0 only if tests ran and every test passed.
package main

import (
	"flag"
	"fmt"
	"os"
	"sync"
	"time"
)

func main() {
	strict := flag.Bool("strict", false, "a skipped test fails the run")
	split := flag.String("split", "", "`N:PACKAGE:PATTERN` whose tests run in N processes at the same time")
	flag.Parse()
	ok, err := suite(*strict, *split, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "suite:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// suite runs the tests, and reports whether all passed.
func suite(strict bool, split string, args []string) (bool, error) {
	start := time.Now()
	flags, packages := divide(args)
	if len(packages) == 0 && split == "" {
		return false, fmt.Errorf("no package is named")
	}
	r := newReport(os.Stdout)
	var wg sync.WaitGroup
	if split != "" {
		dir, err := os.MkdirTemp("", "suite")
		if err != nil {
			return false, err
		}
		defer os.RemoveAll(dir)
		// Before the other packages, so that nothing is compiled twice.
		s, err := buildShards(split, dir, flags)
		if err != nil {
			return false, err
		}
		wg.Go(func() { s.run(r) })
	}
	if len(packages) > 0 {
		wg.Go(func() { goTest(r, args) })
	}
	wg.Wait()
	return r.finish(time.Since(start), strict), nil
}
