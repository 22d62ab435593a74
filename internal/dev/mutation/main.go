// Command mutation checks that the tests detect faults. It puts deliberate faults,
// mutants, into the program, one at a time, and runs the tests that have to fail. No
// source file changes, so several runs are possible at the same time.
//
// A list of mutants is a text file below internal/dev/mutation/mutants:
//
//	mutant name: the fault, in a few words
//	tests ^TestOne$|^TestTwo
//	-text of the sources
//	+text in its place
//
// The old text must occur exactly once below the mutated folders, in any file:
// a mutant follows its code from file to file. A text of several lines has a
// "-" or "+" before each. Without a line "tests" all tests of the mutated
// package run; a pattern selects tests of any package that links the mutated
// one. Lines with "#" are comments.
//
// The command fails below -min per cent, and when the list is invalid: a text
// that does not occur exactly once, a mutant that does not compile, tests that
// fail without it.
package main

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"time"
)

func main() {
	least := flag.Float64("min", 95, "per cent of the mutants that the tests must kill")
	only := flag.String("run", "", "pattern of the names of the mutants to run")
	lists := flag.String("lists", "internal/dev/mutation/mutants", "folder of the lists")
	folders := flag.String("mutate", "proxy,plugins,abi", "folders whose packages the mutants change")
	workers := flag.Int("j", runtime.NumCPU(), "runs at the same time")
	limit := flag.Duration("timeout", 2*time.Minute, "limit of one run; a mutant that exceeds it is killed")
	check := flag.Bool("check", false, "check the lists alone, without a run")
	flag.Parse()
	if err := run(*lists, strings.Split(*folders, ","), *only, *least, *workers, *limit, *check); err != nil {
		fmt.Fprintln(os.Stderr, "mutation:", err)
		os.Exit(1)
	}
}

func run(lists string, folders []string, only string, least float64, workers int, limit time.Duration, check bool) error {
	pattern, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	list, err := readLists(lists)
	if err != nil {
		return err
	}
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	s, err := readSources(dir, folders)
	if err != nil {
		return err
	}
	c, err := newChecker(dir)
	if err != nil {
		return err
	}
	jobs, err := prepareAll(s, c, list, pattern)
	if err != nil || check {
		return err
	}
	scratch, err := os.MkdirTemp("", "pdproxy-mutation")
	if err != nil {
		return err
	}
	defer os.RemoveAll(scratch)
	return suite{dir: dir, scratch: scratch, limit: limit, workers: workers}.run(jobs, least)
}

// prepareAll prepares the mutants whose names match. The error names every
// invalid entry.
func prepareAll(s *sources, c *checker, list []mutant, pattern *regexp.Regexp) (jobs []*job, err error) {
	var wrong []string
	for i := range list {
		m := &list[i]
		if !pattern.MatchString(m.name) {
			continue
		}
		j, err := prepare(s, c, m)
		if err != nil {
			wrong = append(wrong, fmt.Sprintf("%s: mutant %s: %v", m.where, m.name, err))
			continue
		}
		jobs = append(jobs, j)
	}
	if len(wrong) > 0 {
		return nil, fmt.Errorf("the list of mutants is invalid:\n%s", strings.Join(wrong, "\n"))
	}
	if len(jobs) == 0 {
		return nil, fmt.Errorf("no mutant has a name like %s", pattern)
	}
	return jobs, nil
}

// suite holds the directories and settings of a run.
type suite struct {
	dir, scratch string
	limit        time.Duration
	workers      int
}

// run runs the tests without mutants, then with each.
func (s suite) run(jobs []*job, least float64) error {
	var baselines []*job
	seen := make(map[string]bool)
	for _, j := range jobs {
		if b := j.baseline(); !seen[b.key()] {
			seen[b.key()] = true
			baselines = append(baselines, &b)
		}
	}
	var broken []string
	s.each(baselines, func(j *job, o outcome) {
		if o.err != nil || o.killer != "" {
			broken = append(broken, fmt.Sprintf("without a mutant: %s: %s %v", j.key(), o.killer, o.err))
		}
	})
	if len(broken) > 0 {
		return fmt.Errorf("the tests do not pass:\n%s", strings.Join(broken, "\n"))
	}
	killed := 0
	s.each(jobs, func(j *job, o outcome) {
		switch {
		case o.err != nil:
			broken = append(broken, fmt.Sprintf("%s: mutant %s: %v", j.m.where, j.m.name, o.err))
		case o.killer != "":
			killed++
			fmt.Printf("killed    %-28s by %s (%.1f s)\n", j.m.name, o.killer, o.took.Seconds())
		default:
			fmt.Printf("SURVIVED  %-28s %s: %s (%.1f s)\n", j.m.name, j.m.where, j.m.fault, o.took.Seconds())
		}
	})
	if len(broken) > 0 {
		return fmt.Errorf("the list of mutants is invalid:\n%s", strings.Join(broken, "\n"))
	}
	share := 100 * float64(killed) / float64(len(jobs))
	fmt.Printf("%d of %d mutants killed: %.1f %%\n", killed, len(jobs), share)
	if share < least {
		return fmt.Errorf("less than %.0f %%", least)
	}
	return nil
}

// each runs the jobs, several at a time, and reports one outcome at a time.
func (s suite) each(jobs []*job, report func(*job, outcome)) {
	next := make(chan *job)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range s.workers {
		wg.Go(func() {
			for j := range next {
				o := j.run(s.dir, s.scratch, s.limit)
				mu.Lock()
				report(j, o)
				mu.Unlock()
			}
		})
	}
	for _, j := range jobs {
		next <- j
	}
	close(next)
	wg.Wait()
}
