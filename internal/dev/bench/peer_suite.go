package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
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

// Parts of the comparison, in the order in which they run.
var parts = []string{"check", "load", "fault", "hits", "overhead"}

// comparison is the whole result. It is kept beside the page that is written
// from it.
type comparison struct {
	Machine  string             `json:"machine"`
	Go       string             `json:"go"`
	Software []installed        `json:"software"`
	Peers    []peer             `json:"peers"`
	Parts    map[string]partRun `json:"parts"` // by name
	Checks   []check            `json:"checks"`
	Loads    []measured         `json:"loads"`
	Faults   []outcome          `json:"faults"`
	Hits     []hitRow           `json:"hits"`
	Overhead *overhead          `json:"overhead,omitempty"`
}

// partRun says when and of what a part was measured. A run of some peers or cases continues the
// part.
type partRun struct {
	Begin   string  `json:"begin"`
	Minutes float64 `json:"minutes"`
	Program string  `json:"program"` // version of pdproxy, in the latest run
}

// peerSuite is one run of the comparison.
type peerSuite struct {
	*shelf
	rounds         int
	only           []string // parts
	peers, cases   *regexp.Regexp
	some           bool // of the peers or cases
	core, loadCore int
	quick          bool
	dir            string
	stubs          *stubs
	result         comparison
}

func peersCommand(args []string) error {
	fs := flag.NewFlagSet("peers", flag.ContinueOnError)
	binary := fs.String("pdproxy", "bin/pdproxy", "`program` under test")
	rounds := fs.Int("rounds", 5, "rounds of the part load; figures are medians over them")
	only := fs.String("only", strings.Join(parts, ","), "`parts` to run, with commas; the others keep their results")
	who := fs.String("peers", "", "`pattern` of the peers' names; empty: all")
	cases := fs.String("cases", "", "`pattern` of the cases of the parts load and fault; empty: all")
	out := fs.String("json", "docs/benchmarks.json", "`file` for the result; results of other parts in it are kept")
	quick := fs.Bool("quick", false, "short cases: for a look, not for a claim")
	core := fs.Int("core", 0, "CPU core of the proxy under test")
	loadCore := fs.Int("load-core", 1, "CPU core of the load and the engines")
	if err := fs.Parse(args); err != nil {
		return err
	}
	s := &peerSuite{rounds: *rounds, only: strings.Split(*only, ","), core: *core, loadCore: *loadCore, quick: *quick, some: *who+*cases != ""}
	for _, part := range s.only {
		if !slices.Contains(parts, part) {
			return fmt.Errorf("-only: unknown part %q; the parts are %s", part, strings.Join(parts, ", "))
		}
	}
	var err error
	if s.peers, err = regexp.Compile(*who); err != nil {
		return fmt.Errorf("-peers: %w", err)
	}
	if s.cases, err = regexp.Compile(*cases); err != nil {
		return fmt.Errorf("-cases: %w", err)
	}
	if s.shelf, err = newShelf(*binary, os.Stderr); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return s.run(ctx, *out)
}

func (s *peerSuite) run(ctx context.Context, out string) error {
	if runtime.NumCPU() < 2 {
		return fmt.Errorf("two CPU cores are needed, there is %d", runtime.NumCPU())
	}
	if _, err := exec.LookPath("taskset"); err != nil {
		return err
	}
	if err := s.result.read(out); err != nil {
		return err
	}
	begin := time.Now()
	s.install(ctx)
	var err error
	if s.dir, err = os.MkdirTemp("", "peers"); err != nil {
		return err
	}
	defer os.RemoveAll(s.dir)
	r := &s.result
	r.Machine, r.Go, r.Software, r.Peers = machine(), runtime.Version(), s.states, append(slices.Clone(peers), kvAware)
	if r.Parts == nil {
		r.Parts = map[string]partRun{}
	}
	for _, part := range s.only {
		at := time.Now()
		if err := s.part(ctx, part); err != nil {
			return fmt.Errorf("%s: %w", part, err)
		}
		took := time.Since(at).Minutes()
		one := partRun{Begin: at.UTC().Format("2006-01-02 15:04"), Minutes: took, Program: s.state(pdproxy).Version}
		if before, ok := r.Parts[part]; ok && s.some {
			one.Begin, one.Minutes = before.Begin, before.Minutes+took
		}
		r.Parts[part] = one
		if err := r.write(out); err != nil {
			return err
		}
		fmt.Fprintf(s.log, "part %s took %.1f minutes\n", part, took)
	}
	fmt.Fprintf(s.log, "the whole took %.1f minutes; bench page writes the page\n", time.Since(begin).Minutes())
	return nil
}

func (s *peerSuite) part(ctx context.Context, part string) error {
	switch part {
	case "check":
		return s.checkAll(ctx)
	case "load":
		return s.loadAll(ctx)
	case "fault":
		return s.faultAll(ctx)
	case "hits":
		return s.hitsAll(ctx)
	}
	return s.overheadRun(ctx)
}

const notInstalled = "not installed: "

// unfit returns why a peer is not measured, "" if it is.
func (s *peerSuite) unfit(p *peer) string {
	if why := s.missing(p); why != "" {
		return notInstalled + why
	}
	for _, c := range s.result.Checks {
		if c.Peer == p.Name && !c.Works && !strings.HasPrefix(c.Error, notInstalled) { // it is installed now
			return "fails the check: " + c.Error
		}
	}
	return ""
}

// chosen returns the peers that the run is for, and that a case wants.
func (s *peerSuite) chosen(want func(*peer) bool) (all []*peer) {
	for i := range peers {
		if p := &peers[i]; s.peers.MatchString(p.Name) && want(p) {
			all = append(all, p)
		}
	}
	return all
}

func (c *comparison) read(path string) error {
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return json.Unmarshal(text, c)
}

func (c *comparison) write(path string) error {
	text, err := json.MarshalIndent(c, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(compactNumbers(text), '\n'), 0o644)
}

// numbers is a list of numbers, one on each line.
var numbers = regexp.MustCompile(`\[\s+(-?[0-9.e+-]+,\s+)*-?[0-9.e+-]+\s+\]`)

// compactNumbers puts each list of numbers on one line.
func compactNumbers(text []byte) []byte {
	blanks := regexp.MustCompile(`\s+`)
	return numbers.ReplaceAllFunc(text, func(list []byte) []byte { return blanks.ReplaceAll(list, nil) })
}
