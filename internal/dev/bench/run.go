package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// suite is one run of all cases over all kinds.
type suite struct {
	programs programs
	cases    []benchCase
	rounds   int
	only     *regexp.Regexp
	core     int           // of the load and the backend
	patience time.Duration // wait before each case until other programs leave the cores
	log      io.Writer

	backend  *process
	versions map[string]string // by program
	missing  map[string]string // by kind: why it cannot run
	runs     []run
}

// run is one result, or the reason why there is none.
type run struct {
	Round  int     `json:"round"`
	Kind   string  `json:"kind"`
	Case   string  `json:"case"`
	Failed string  `json:"failed,omitempty"`
	Others float64 `json:"others"` // share of the two cores that other programs used meanwhile
	Result *result `json:"result,omitempty"`
}

func runCommand(args []string) error {
	fs := flag.NewFlagSet("run", flag.ContinueOnError)
	binary := fs.String("pdproxy", "bin/pdproxy", "`program` under test")
	python := fs.String("python", "/usr/bin/python3", "`program` for the Python peers")
	rounds := fs.Int("rounds", 0, "rounds; figures are medians over them; 0: three, one with -quick")
	quick := fs.Bool("quick", false, "short rounds of about two minutes: for a look, not for a claim")
	only := fs.String("only", "", "`pattern` of KIND/CASE; empty: all")
	out := fs.String("json", "", "`file` for all results")
	core := fs.Int("core", 0, "CPU core of the proxy under test")
	loadCore := fs.Int("load-core", 1, "CPU core of the load and the backend")
	patience := fs.Duration("patience", 0, "how long to wait, before each case, for other programs to leave the cores")
	if err := fs.Parse(args); err != nil {
		return err
	}
	pattern, err := regexp.Compile(*only)
	if err != nil {
		return fmt.Errorf("-only: %w", err)
	}
	p, n := fullPace, 3
	if *quick {
		p, n = quickPace, 1
	}
	if *rounds > 0 {
		n = *rounds
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	s := &suite{rounds: n, only: pattern, core: *loadCore, patience: *patience, log: os.Stderr}
	s.programs = programs{pdproxy: *binary, python: *python, core: *core, descriptors: descriptorLimit()}
	s.cases = newCases(p, s.programs.descriptors)
	if err := s.run(ctx); err != nil {
		return err
	}
	r := s.report()
	r.print(os.Stdout)
	if *out == "" {
		return nil
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(*out, append(text, '\n'), 0o644)
}

func (s *suite) run(ctx context.Context) error {
	if runtime.NumCPU() < 2 {
		return fmt.Errorf("two CPU cores are needed, there is %d", runtime.NumCPU())
	}
	_, err := exec.LookPath("taskset")
	if err != nil {
		return err
	}
	if s.programs.self, err = os.Executable(); err != nil {
		return err
	}
	if s.programs.dir, err = os.MkdirTemp("", "bench"); err != nil {
		return err
	}
	defer os.RemoveAll(s.programs.dir)
	s.probeAll()
	if err := s.startBackend(ctx); err != nil {
		return err
	}
	defer s.backend.stop()
	for round := 1; round <= s.rounds; round++ {
		for _, kind := range kinds {
			if err := s.runKind(ctx, round, kind); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *suite) startBackend(ctx context.Context) error {
	addr, err := freeAddr()
	if err != nil {
		return err
	}
	if s.backend, err = launch(ctx, s.programs.dir, "backend", s.core, s.programs.self, "backend", "-listen", addr); err != nil {
		return err
	}
	s.backend.addr = addr
	if err := s.backend.await(func() error { return accepts(addr) }); err != nil {
		s.backend.stop()
		return fmt.Errorf("backend: %w", err)
	}
	return nil
}

// probeAll checks which kinds can run, before a suite that takes hours.
func (s *suite) probeAll() {
	s.versions = map[string]string{"go": runtime.Version()}
	s.missing = map[string]string{}
	for _, kind := range kinds {
		program, version, err := s.programs.probe(kind)
		switch {
		case err != nil:
			s.missing[kind] = err.Error()
			fmt.Fprintf(s.log, "missing: %s: %v\n", kind, err)
		case program != "":
			s.versions[program] = version
		}
	}
}

// runKind runs the cases of one kind, first those that share a process. A
// failure of a kind is recorded; a returned error is the suite's own.
func (s *suite) runKind(ctx context.Context, round int, kind string) error {
	if _, missing := s.missing[kind]; missing {
		return nil
	}
	var shared, fresh []benchCase
	for _, c := range s.cases {
		switch {
		case !slices.Contains(c.kinds, kind) || !s.only.MatchString(kind+"/"+c.name):
		case c.fresh:
			fresh = append(fresh, c)
		default:
			shared = append(shared, c)
		}
	}
	if len(shared) > 0 {
		if err := s.runOn(ctx, round, kind, true, shared...); err != nil {
			return err
		}
	}
	for _, c := range fresh {
		if err := s.runOn(ctx, round, kind, false, c); err != nil {
			return err
		}
	}
	return nil
}

// runOn starts a kind, runs cases on it, and stops it.
func (s *suite) runOn(ctx context.Context, round int, kind string, warm bool, cases ...benchCase) error {
	addr := s.backend.addr
	var pids []int
	var proc *process
	if kind != direct {
		var err error
		proc, err = s.programs.start(ctx, kind, addr)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			for _, c := range cases {
				s.record(run{Round: round, Kind: kind, Case: c.name, Failed: err.Error()})
			}
			return nil
		}
		defer proc.stop()
		addr = proc.addr
		if pids, err = family(proc.cmd.Process.Pid); err != nil {
			return err
		}
	}
	if warm {
		l := cases[0].load
		l.Mode, l.Conns, l.For, l.Addr = modeClosed, 4, 300*time.Millisecond, addr
		l.Events = min(l.Events, 1)
		if _, _, err := s.runLoad(ctx, &l); err != nil && ctx.Err() == nil {
			fmt.Fprintf(s.log, "%s: warm up: %v\n", kind, err)
		}
	}
	for _, c := range cases {
		l := c.load
		l.Addr, l.PIDs = addr, pids
		one := run{Round: round, Kind: kind, Case: c.name}
		if err := s.awaitQuiet(ctx, pids); err != nil {
			return err
		}
		var err error
		one.Result, one.Others, err = s.measure(ctx, kind, &l)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			one.Failed = err.Error()
			if proc != nil {
				fmt.Fprintf(s.log, "%s: the last of its log: %s\n", kind, proc.tail())
			}
		}
		s.record(one)
	}
	return nil
}

func (s *suite) record(r run) {
	s.runs = append(s.runs, r)
	fmt.Fprintf(s.log, "round %d  %-18s %-11s %s\n", r.Round, r.Kind, r.Case, r.summary())
}

// measure runs a load. It checks that the backend received as many requests as
// the load got answers to, and returns the share of the cores that other
// programs used. engines are the peer's own engines, which are no other programs.
func (s *suite) measure(ctx context.Context, kind string, l *load, engines ...int) (r *result, others float64, err error) {
	before, err := s.counts(ctx)
	if err != nil {
		return nil, 0, err
	}
	watch, err := s.watch(append(engines, l.PIDs...))
	if err != nil {
		return nil, 0, err
	}
	r, used, err := s.runLoad(ctx, l)
	if err != nil {
		return nil, 0, err
	}
	if others, err = watch(used); err != nil {
		return nil, 0, err
	}
	after, err := s.counts(ctx)
	if err != nil {
		return nil, 0, err
	}
	if r.Errors > 0 {
		return r, others, fmt.Errorf("%d errors, the first: %s", r.Errors, r.FirstError)
	}
	return r, others, checkCounts(after.minus(before), kind, l, r)
}

// awaitQuiet waits, up to its patience, for a second in which other programs do
// not use the cores.
func (s *suite) awaitQuiet(ctx context.Context, proxy []int) error {
	for limit := time.Now().Add(s.patience); time.Now().Before(limit); {
		watch, err := s.watch(proxy)
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
		if others, err := watch(0); err != nil || others < disturbed {
			return err
		}
	}
	return nil
}

// watch starts to measure the use of the two cores. The returned function ends
// the measurement. It returns the share of the cores used by programs other
// than the proxy, the backend and the load; its argument is the load's CPU
// time.
func (s *suite) watch(proxy []int) (func(load time.Duration) (float64, error), error) {
	pids := append([]int{s.backend.cmd.Process.Pid}, proxy...)
	cores := []int{s.core, s.programs.core}
	start := time.Now()
	read := func() (time.Duration, error) {
		busy, err := busyTime(cores...)
		if err != nil {
			return 0, err
		}
		own, err := usageOf(pids)
		return busy - own.CPU, err
	}
	before, err := read()
	if err != nil {
		return nil, err
	}
	return func(load time.Duration) (float64, error) {
		after, err := read()
		room := time.Since(start) * time.Duration(len(cores))
		return max(0, (after-before-load).Seconds()/room.Seconds()), err
	}, nil
}

// checkCounts allows more requests than expected, because a proxy may repeat a
// leg.
func checkCounts(got counts, kind string, l *load, r *result) error {
	n := int64(max(r.Requests, r.Open))
	least := counts{}
	switch {
	case kind == ownEngines:
	case isPD(kind):
		least.Prefill, least.Decode = n, n
	case l.Events > 0:
		least.Stream = n
	default:
		least.Whole = n
	}
	if got.Whole < least.Whole || got.Prefill < least.Prefill || got.Decode < least.Decode || got.Stream < least.Stream {
		return fmt.Errorf("the engine was asked for %+v, expected at least %+v", got, least)
	}
	return nil
}

func (s *suite) counts(ctx context.Context) (c counts, err error) {
	err = getJSON(ctx, "http://"+s.backend.addr+countsPath, &c)
	return c, err
}

// runLoad runs a load in a separate process on the backend's core, and returns the CPU
// time that it used.
func (s *suite) runLoad(ctx context.Context, l *load) (*result, time.Duration, error) {
	limit := 2*time.Minute + l.For
	if l.Mode == modeSSE {
		limit += time.Duration(l.Events) * l.Period
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var stderr strings.Builder
	cmd := pinned(ctx, s.core, append([]string{s.programs.self}, l.args()...)...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, 0, fmt.Errorf("load: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	r := &result{}
	return r, cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(), json.Unmarshal(out, r)
}

// descriptorLimit returns the hard limit of open files. The programs raise
// their soft limits to it.
func descriptorLimit() int {
	const fallback = 4096
	text, err := os.ReadFile("/proc/self/limits")
	if err != nil {
		return fallback
	}
	return parseDescriptorLimit(string(text), fallback)
}

func parseDescriptorLimit(limits string, fallback int) int {
	for line := range strings.Lines(limits) {
		var soft, hard int
		if rest, ok := strings.CutPrefix(line, "Max open files"); ok {
			if n, err := fmt.Sscan(rest, &soft, &hard); n == 2 && err == nil {
				return hard
			}
		}
	}
	return fallback
}
