package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// checker compares the program of a commit, base, with that of the working tree, head. Both take
// turns on the same core, so that a disturbance affects both.
type checker struct {
	suite     suite
	threshold float64 // a smaller change does not count
	sides     [2]side // base, head
	rows      []*checkRow
}

// side is one of the two programs.
type side struct {
	programs
	running map[string]*process // by kind
}

// checkRow is one case with its measurements.
type checkRow struct {
	name, kind string
	load       load
	perEvent   bool
	rounds     [][2]figures // base, head
	failed     error
}

func checkCommand(args []string) error {
	fs := flag.NewFlagSet("check", flag.ContinueOnError)
	base := fs.String("base", "", "`commit` to compare with")
	rounds := fs.Int("rounds", 40, "most rounds")
	threshold := fs.Float64("threshold", 3, "a change of less than so many `percent` does not count")
	only := fs.String("only", "", "`pattern` of rows; empty: all")
	core := fs.Int("core", 0, "CPU core of the programs")
	loadCore := fs.Int("load-core", 1, "CPU core of the load and the backend")
	if err := fs.Parse(args); err != nil {
		return err
	}
	pattern, err := regexp.Compile(*only)
	if err != nil {
		return fmt.Errorf("-only: %w", err)
	}
	if *base == "" {
		return errors.New("bench check needs -base")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	c := &checker{suite: suite{core: *loadCore, log: os.Stderr}, threshold: *threshold / 100}
	for _, r := range checkRows() {
		if pattern.MatchString(r.name) {
			c.rows = append(c.rows, r)
		}
	}
	dir, err := os.MkdirTemp("", "bench-check")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if c.suite.programs.self, err = os.Executable(); err != nil {
		return err
	}
	c.suite.programs.core, c.suite.programs.dir, c.suite.programs.descriptors = *core, dir, descriptorLimit()
	if err := c.build(ctx, dir, *base); err != nil {
		return err
	}
	if err := c.run(ctx, *rounds); err != nil {
		return err
	}
	return c.print(os.Stdout, *base)
}

// checkRows returns the cases, without their addresses.
func checkRows() []*checkRow {
	const kb = 1 << 10
	requests, streams := 700*time.Millisecond, time.Second
	row := func(name, kind string, perEvent bool, l load) *checkRow {
		return &checkRow{name: name, kind: kind, perEvent: perEvent, load: l}
	}
	closed := func(conns, body, events int) load { return closedLoad(conns, body, events, requests) }
	sse := func(conns int) load { return sseLoad(conns, 2*kb, int(streams/tokenPeriod)) }
	return []*checkRow{
		row("request of 2 KB, 64 connections", pdproxy, false, closed(64, 2*kb, 0)),
		row("request of 2 KB, 1 connection", pdproxy, false, closed(1, 2*kb, 0)),
		row("request of 2 KB, 300 a second", pdproxy, false, openLoad(300, requests)),
		row("event, 100 streams", pdproxy, true, sse(100)),
		row("event, 500 streams", pdproxy, true, sse(500)),
		row("PD request of 2 KB", pdproxyPD, false, closed(16, 2*kb, 1)),
		row("PD request of 32 KB", pdproxyPD, false, closed(16, 32*kb, 1)),
		row("PD request of 256 KB", pdproxyPD, false, closed(8, 256*kb, 1)),
	}
}

// build builds the programs of both sides. The program of base needs a work tree of its own.
func (c *checker) build(ctx context.Context, dir, base string) error {
	run := func(in, name string, args ...string) error {
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Dir = in
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
		}
		return nil
	}
	tree := filepath.Join(dir, "tree")
	if err := run("", "git", "worktree", "add", "--detach", tree, base); err != nil {
		return err
	}
	defer exec.Command("git", "worktree", "remove", "--force", tree).Run()
	for i, in := range [2]string{tree, ""} {
		s := &c.sides[i]
		s.programs, s.running = c.suite.programs, map[string]*process{}
		s.dir = filepath.Join(dir, strconv.Itoa(i))
		s.pdproxy = filepath.Join(s.dir, "pdproxy")
		if err := run(in, "go", "build", "-trimpath", "-o", s.pdproxy, "./cmd/pdproxy"); err != nil {
			return err
		}
	}
	return nil
}

func (c *checker) run(ctx context.Context, rounds int) error {
	if err := c.suite.startBackend(ctx); err != nil {
		return err
	}
	defer c.suite.backend.stop()
	for i := range c.sides {
		s := &c.sides[i]
		defer s.stop()
		for _, r := range c.rows {
			if s.running[r.kind] != nil {
				continue
			}
			if err := s.start(ctx, r.kind, c.suite.backend.addr); err != nil {
				return err
			}
			if _, err := c.measure(ctx, s, r); err != nil { // a first run, which does not count
				return fmt.Errorf("%s: %w", r.name, err)
			}
		}
	}
	for round := range rounds {
		open := 0
		for _, r := range c.rows {
			if _, sure := c.judge(r); sure || r.failed != nil {
				continue
			}
			open++
			var pair [2]figures
			for n := range pair {
				side := (n + round) % 2 // A B B A
				if pair[side], r.failed = c.measure(ctx, &c.sides[side], r); r.failed != nil {
					break
				}
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if r.failed == nil {
				r.rounds = append(r.rounds, pair)
			}
		}
		if open == 0 {
			break
		}
		fmt.Fprintf(c.suite.log, "round %d: %d of %d rows have no verdict yet\n", round+1, open, len(c.rows))
	}
	return nil
}

// start starts the proxy of a kind, with an address for its metrics.
func (s *side) start(ctx context.Context, kind, upstream string) error {
	addr, err := freeAddr()
	if err != nil {
		return err
	}
	metrics, err := freeAddr()
	if err != nil {
		return err
	}
	conf, err := s.pdproxyConfig(kind, addr, upstream)
	if err != nil {
		return err
	}
	file, err := os.OpenFile(conf, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(file, "[metrics]\nlisten = %q\n", metrics)
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	p, err := launch(ctx, s.dir, kind, s.core, s.pdproxy, "run", conf)
	if err != nil {
		return err
	}
	p.addr, p.metrics = addr, metrics
	s.running[kind] = p
	return p.await(func() error { return healthy(ctx, kind, addr) })
}

func (s *side) stop() {
	for _, p := range s.running {
		p.stop()
	}
}

func (c *checker) measure(ctx context.Context, s *side, r *checkRow) (f figures, err error) {
	p := s.running[r.kind]
	l := r.load
	l.Addr, l.PIDs = p.addr, []int{p.cmd.Process.Pid}
	before, err := mallocs(ctx, p.metrics)
	if err != nil {
		return f, err
	}
	counters := startPerf(ctx, l.PIDs[0])
	result, _, err := c.suite.measure(ctx, r.kind, &l)
	calls, instructions := counters()
	if err != nil {
		return f, err
	}
	after, err := mallocs(ctx, p.metrics)
	if err != nil {
		return f, err
	}
	n, cpu := result.Requests, result.CPURequest
	if r.perEvent {
		n, cpu = result.Events, result.CPUEvent
	}
	return figures{cpu: cpu, calls: per(calls, n), instructions: per(instructions, n), mallocs: per(after-before, n)}, nil
}
