package cmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/internal/replay"
	"github.com/pdproxy/pdproxy/policies"
)

// replayFlags are the flags of the command.
type replayFlags struct {
	fleet            replay.Config
	traces, policies []string
	agents           int
	turns            bool
	retains          []string
	params           []string
	config           string
	variant          string
	preset, model    string
	runtime, html    string
	ttft, itl        time.Duration
}

func (a *app) replayCommand() *cobra.Command {
	var r replayFlags
	c := &cobra.Command{
		Use:   "replay {--trace FILE [--turns]|--agents N} [--policy NAME|FILE.wasm]",
		Short: "Measure policies on a recorded trace, or on agents, against a simulated fleet",
		Long: `Measure place policies on a recorded trace against a simulated fleet, faster
than real time.

A trace has one JSON object per line: timestamp (ms), input_length, output_length
(tokens), hash_ids, and conversation if the client named it. Each of the hash_ids
identifies one block of the prompt together with all blocks before it. Mooncake's
traces and the recordings of pdproxy run have this form.

The command scales the arrival times once for all policies. With the scaled times
and one unlimited cache for all prompts, the prefill work of the trace would use
--load of the fleet's prefill capacity. The same flags give the same result,
except for the decisions per second.

With --turns, the command plays the conversations of the trace and measures retain
policies: how long decode keeps the KV of a turn, so that prefill can pull it for the next
turn. With the policy none, decode frees the KV at once, and no turn uses it. A request is
the next turn of an earlier one if it begins with all whole blocks of that prompt and is
long enough to contain its answer. --load sets how many conversations begin in a second.
Later turns keep their recorded time since the turn before, but wait for its answer. One
--policy places all requests (default kv_aware), and --retain names the retain policies
(default all built-in ones).

With --agents, the command makes sessions of agents from the seed instead. The next turn of
a session begins after the answer and the time of a tool; most tools take less than 1 s.
Some tools are sub-agents with sessions of their own.

--volatile is the share of the sessions whose client changes a text in the first block of
each prompt, as the billing header of a coding agent does, so that no cache knows the
prompt. Each retain policy then has two rows: without and with the filter stable_prefix,
which removes the text.

--variant plays another trace, which the command makes from the conversations of
the given one. The same kind and seed give the same trace.`,
		Example: `  pdproxy replay --trace trace.jsonl --policy least_load --policy kv_aware
  pdproxy replay --trace trace.jsonl --policy my-router.wasm --html report.html
  pdproxy replay --trace trace.jsonl --variant shifted:2 --policy kv_aware
  pdproxy replay --trace trace.jsonl --turns --volatile 0.5 --load 0.5
  pdproxy replay --agents 300 --prefill 2 --ranks 1 --decode 2 --load 0.5`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return a.replay(&r) },
	}
	f := c.Flags()
	f.StringArrayVar(&r.traces, "trace", nil, "file with a trace; repeatable, except with --json")
	f.IntVar(&r.agents, "agents", 0, "number of sessions of agents, instead of a trace")
	f.BoolVar(&r.turns, "turns", false, "play the conversations of the trace, and measure retain policies")
	f.StringArrayVar(&r.retains, "retain", nil, "built-in retain policy (%s), FILE.wasm, or FILE.wasm/NAME, for --turns or --agents; repeatable; default all built-in policies")
	f.Float64Var(&r.fleet.Volatile, "volatile", 0, "share of sessions whose client changes the first block of each prompt, for --turns or --agents")
	f.StringVar(&r.config, "config", "", "configuration whose [[scores]] and [[plugin]] --policy scores uses; default: the usual scorers")
	f.StringVar(&r.variant, "variant", "", "KIND:SEED: play a trace made from the conversations of each trace; the kinds are %s")
	f.StringArrayVar(&r.policies, "policy", nil, "built-in place policy (%s), FILE.wasm, or FILE.wasm/NAME for a module with several policies; scores, or scores/SET for one set of --config; repeatable; default all built-in policies but scores")
	f.StringArrayVar(&r.params, "param", nil, "parameter of a built-in policy, such as kv_aware.patience=16; repeatable")
	f.StringVar(&r.runtime, "runtime", "wasm", "runtime of the built-in policies: %s")
	f.IntVar(&r.fleet.Prefill, "prefill", 4, "prefill instances")
	f.IntVar(&r.fleet.Ranks, "ranks", 4, "ranks of each prefill instance")
	f.IntVar(&r.fleet.Decode, "decode", 4, "decode instances")
	f.IntVar(&r.fleet.BlocksPerRank, "blocks-per-rank", 4000, "KV blocks of each prefill rank")
	f.IntVar(&r.fleet.BlockTokens, "block-tokens", 512, "tokens in one block of the trace")
	f.Float64Var(&r.fleet.Load, "load", 0.9, "share of the prefill capacity that the trace would use with the ideal hit ratio")
	f.StringVar(&r.preset, "preset", replay.Presets()[0], "speed and memory of the engines: %s")
	f.StringVar(&r.model, "model-file", "", "TOML file with the keys of a preset, instead of --preset")
	f.DurationVar(&r.ttft, "slo-ttft", 0, "limit of a good request for the time to first token; 0: as in the preset")
	f.DurationVar(&r.itl, "slo-itl", 0, "limit of a good request for the mean time between tokens; 0: as in the preset")
	f.Uint64Var(&r.fleet.Seed, "seed", 1, "seed of the random numbers for policies")
	f.StringVar(&r.html, "html", "", "file for a report with plots")
	completeReplay(c)
	return a.addJSON(a.addLog(c))
}

// completeReplay gives the flags of the command their values and completions.
func completeReplay(c *cobra.Command) {
	f := c.Flags()
	chooseOf(c, "runtime", "wasm", "native")
	chooseOf(c, "preset", replay.Presets()...)
	choose(c, f, "variant", choice{allowed: replay.Variants(), cut: ahead(":")})
	isFile := func(name string) bool {
		_, _, ok := cutWasm(name)
		return ok
	}
	choose(c, f, "policy", choice{allowed: policies.PlaceNames(), suffixes: []string{"wasm"}, other: func(name string) bool { return isFile(name) || isScores(name) }})
	choose(c, f, "retain", choice{allowed: policies.RetainNames(), suffixes: []string{"wasm"}, other: isFile})
	completeFile(c, "jsonl", "trace")
	completeFile(c, "toml", "model-file", "config")
	completeFile(c, "html", "html")
}

func (a *app) replay(r *replayFlags) error {
	log, err := a.logger()
	if err != nil {
		return err
	}
	if r.agents > 0 || r.turns {
		return a.replaySessions(r, log)
	}
	if err := r.check(a.json); err != nil {
		return err
	}
	if err := r.readModel(); err != nil {
		return err
	}
	var labs []*replay.Lab
	for _, path := range r.traces {
		t, err := r.trace(path, log)
		if err != nil {
			return err
		}
		lab, err := replay.New(r.fleet, t)
		if err != nil {
			return err
		}
		labs = append(labs, lab)
	}
	params, err := parseParams(r.params)
	if err != nil {
		return err
	}
	page, err := r.page()
	if err != nil {
		return err
	}
	defer page.Close()
	results := make([][]*replay.Result, len(labs))
	for _, name := range r.policies {
		for i, lab := range labs {
			// Each run has a separate set, because a guest may keep state of an earlier
			// run.
			p, err := r.newPlacer(name, defaultRetain, params, log)
			if err != nil {
				return fmt.Errorf("--policy %s: %w", name, err)
			}
			results[i] = append(results[i], lab.Run(name, p))
			if err := p.set.Close(context.Background()); err != nil {
				return exit.Failed(err)
			}
		}
	}
	var reports []*replay.Report
	for i, lab := range labs {
		reports = append(reports, lab.Report(results[i]))
	}
	return exit.Failed(writeReports(a, reports, page, replay.WriteHTML))
}

// check checks the flags for traces, and sets the default of --policy.
func (r *replayFlags) check(json bool) error {
	switch {
	case r.agents < 0:
		return fmt.Errorf("--agents: must not be negative")
	case len(r.retains) > 0:
		return fmt.Errorf("--retain: needs --turns or --agents")
	case r.fleet.Volatile != 0:
		return fmt.Errorf("--volatile: needs --turns or --agents")
	case len(r.traces) == 0:
		return fmt.Errorf("--trace or --agents is needed")
	case len(r.traces) > 1 && json:
		return fmt.Errorf("--trace: one with --json")
	case r.ttft < 0:
		return fmt.Errorf("--slo-ttft: must not be negative")
	case r.itl < 0:
		return fmt.Errorf("--slo-itl: must not be negative")
	case len(r.policies) == 0:
		r.policies = policies.PlaceNames()
	}
	return nil
}

// page creates the file of --html; nil: there is none. The command creates it before the runs, so that a wrong
// path costs none.
func (r *replayFlags) page() (*os.File, error) {
	if r.html == "" {
		return nil, nil
	}
	page, err := os.Create(r.html)
	if err != nil {
		return nil, fmt.Errorf("--html: %w", err)
	}
	return page, nil
}

// table is a report for readers.
type table interface{ WriteTable(io.Writer) error }

// writeReports prints the reports, and writes them to page with plots; nil: there is no page.
func writeReports[R table](a *app, reports []R, page *os.File, write func(io.Writer, []R) error) error {
	if page != nil {
		if err := errors.Join(write(page, reports), page.Close()); err != nil {
			return fmt.Errorf("--html: %w", err)
		}
	}
	if a.json {
		return a.printJSON(reports[0])
	}
	for i, report := range reports {
		if i > 0 {
			fmt.Fprintln(a.out)
		}
		if err := report.WriteTable(a.out); err != nil {
			return err
		}
	}
	return nil
}

// readModel reads the model that the flags name.
func (r *replayFlags) readModel() error {
	m, err := replay.Preset(r.preset)
	if r.model != "" {
		f, e := os.Open(r.model)
		if e != nil {
			return fmt.Errorf("--model-file: %w", e)
		}
		defer f.Close()
		if m, err = replay.ReadModel(f); err != nil {
			return fmt.Errorf("--model-file: %w", err)
		}
	} else if err != nil {
		return fmt.Errorf("--preset: %w", err)
	}
	r.fleet.Model = *m
	if r.ttft > 0 {
		r.fleet.Model.TTFTMillis = float64(r.ttft) / float64(time.Millisecond)
	}
	if r.itl > 0 {
		r.fleet.Model.ITLMillis = float64(r.itl) / float64(time.Millisecond)
	}
	return nil
}

// trace reads one trace.
func (r *replayFlags) trace(path string, log *slog.Logger) (*replay.Trace, error) {
	if r.fleet.BlockTokens < 1 {
		return nil, fmt.Errorf("--block-tokens: %d is not above 0", r.fleet.BlockTokens)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("--trace: %w", err)
	}
	defer f.Close()
	t, err := replay.ReadTrace(filepath.Base(path), f, r.fleet.BlockTokens)
	if err != nil {
		return nil, fmt.Errorf("--trace %s: %w", path, err)
	}
	if t.Uneven > 0 {
		log.Warn("hash_ids do not fit input_length; is --block-tokens that of the trace?", "trace", path, "requests", t.Uneven, "of", len(t.Requests))
	}
	if r.variant != "" {
		if t, err = r.vary(t); err != nil {
			return nil, fmt.Errorf("--variant: %w", err)
		}
	}
	return t, nil
}

// vary makes the variant of a trace that --variant names.
func (r *replayFlags) vary(t *replay.Trace) (*replay.Trace, error) {
	kind, text, _ := strings.Cut(r.variant, ":")
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("%q is not KIND:SEED", r.variant)
	}
	return replay.Vary(t, kind, seed, r.fleet.BlockTokens)
}

// parseParams reads lines of the form POLICY.NAME=VALUE.
func parseParams(texts []string) (policies.Params, error) {
	params := policies.Params{}
	for _, text := range texts {
		key, value, _ := strings.Cut(text, "=")
		policy, name, ok := strings.Cut(key, ".")
		n, err := strconv.ParseFloat(value, 64)
		if !ok || err != nil {
			return nil, fmt.Errorf("--param: %q is not POLICY.NAME=NUMBER", text)
		}
		if params[policy] == nil {
			params[policy] = make(map[string]float64)
		}
		params[policy][name] = n
	}
	if _, err := policies.New(params); err != nil {
		return nil, fmt.Errorf("--param: %w", err)
	}
	return params, nil
}
