package cmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/internal/loadgen"
	"github.com/pdproxy/pdproxy/internal/replay"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// benchFlags are the flags of the command.
type benchFlags struct {
	load                loadgen.Config
	keyFile, trace, ids string
	slo, sweep          string
	output, html        string
	given               func(flag string) bool // on the command line
	uneven              string                 // warning about the trace, "" for none
}

func (a *app) benchCommand() *cobra.Command {
	var b benchFlags
	cmd := &cobra.Command{
		Use:   "bench --url URL",
		Short: "Send load to an OpenAI endpoint and measure the latency for clients",
		Long: `Send load to an OpenAI endpoint and measure time to first token (TTFT), mean time
of each further token (TPOT), time between events (ITL; an event may contain
several tokens), time of whole answers, and throughput. Reasoning, refusals and
parts of tool calls count as text does.

All requests ask for streams. Without --rate and --trace, --concurrency requests
are always open. With --rate, requests are due at random times, whatever the
number of open requests. With --trace, they are due at the times of the trace,
and their prompts share blocks exactly as those of the trace do. Times count
from the time at which a request was due; the results also show them from the
time at which it was sent.

The same flags send the same prompts. The times cover only complete answers; the
exit code is 1 if there are none. An interrupt ends the run and prints the results
so far.`,
		Example: `  pdproxy bench --url http://127.0.0.1:8080
  pdproxy bench --url http://127.0.0.1:8080 --sweep rate=1,2,4,8 --slo ttft=500ms,itl=50ms --html report.html
  pdproxy bench --url http://127.0.0.1:8080 --trace trace.jsonl --speed 2 --output a.jsonl
  pdproxy bench compare a.jsonl b.jsonl`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			b.given = cmd.Flags().Changed
			return a.bench(&b)
		},
	}
	b.addTo(cmd)
	cmd.AddCommand(a.benchCompareCommand())
	return a.addJSON(cmd)
}

func (b *benchFlags) addTo(cmd *cobra.Command) {
	f, c := cmd.Flags(), &b.load
	f.StringVar(&c.URL, "url", "", "endpoint: http://host:port, host:port, or OpenAI's base URL that ends in /v1")
	f.StringVar(&c.API, "api", loadgen.APIChat, "API of the requests: %s; default with --trace "+loadgen.APICompletions)
	f.StringVar(&c.Model, "model", "", "model to name; default the first of /v1/models")
	f.StringVar(&b.keyFile, "key-file", "", "file with the API key")
	f.IntVar(&c.Requests, "requests", 100, "requests to send and measure; default with --trace all of the trace")
	f.IntVar(&c.WarmUp, "warm-up", -1, "requests to send before, without measuring them; -1: as many as --concurrency")
	f.IntVar(&c.Concurrency, "concurrency", 8, "concurrent requests; with --rate or --trace, if given, the most open conversations")
	f.Float64Var(&c.Rate, "rate", 0, "requests per second at random times, instead of --concurrency")
	f.IntVar(&c.PromptWords, "prompt-words", 256, "words of a prompt; the tokenizer determines how many tokens a word has, and the results show the prompt tokens")
	f.IntVar(&c.Shared, "shared-words", 0, "words at the beginning of all prompts")
	f.IntVar(&c.MaxTokens, "max-tokens", 64, "most tokens of an answer")
	f.BoolVar(&c.IgnoreEOS, "ignore-eos", false, "request answers of exactly --max-tokens (vLLM, SGLang)")
	f.IntVar(&c.Turns, "turns", 1, "requests of one conversation; each repeats the earlier prompts and answers")
	f.DurationVar(&c.Think, "think", 0, "mean time between an answer and the next turn; the times are exponentially distributed")
	f.IntVar(&c.TurnWords, "turn-words", 32, "words of the second and later prompts of a conversation")
	f.StringVar(&b.trace, "trace", "", "file with a trace in the form of pdproxy replay")
	f.IntVar(&c.BlockTokens, "block-tokens", 512, "tokens in one block of the trace")
	f.Float64Var(&c.Speed, "speed", 1, "how much faster than recorded the requests of a trace arrive")
	f.StringVar(&b.ids, "token-ids", loadgen.DefaultIDs.String(), "range of ordinary token ids of the model, of which prompts of a trace consist with --api completions")
	f.StringVar(&b.sweep, "sweep", "", "one run for each value: rate=1,2,4, concurrency=1,2,4, or with --trace speed=1,2,4")
	f.StringVar(&b.slo, "slo", "", "limits of a good request: ttft=500ms,itl=50ms,e2e=10s, of which any may be missing; itl limits the mean time between tokens")
	f.StringVar(&b.output, "output", "", "file for one JSON line for each measured request")
	f.StringVar(&b.html, "html", "", "file for a report with plots")
	f.DurationVar(&c.Timeout, "timeout", 5*time.Minute, "limit of one request")
	f.Uint64Var(&c.Seed, "seed", 1, "seed of the prompts and the times")
	chooseOf(cmd, "api", loadgen.APIChat, loadgen.APICompletions, loadgen.APIResponses)
	choose(cmd, f, "sweep", choice{allowed: []string{loadgen.SweepRate, loadgen.SweepConcurrency, loadgen.SweepSpeed}, cut: ahead("=")})
	completeFile(cmd, "jsonl", "trace", "output")
	completeFile(cmd, "html", "html")
}

// runs checks the flags and returns the configuration of each run.
func (b *benchFlags) runs() ([]loadgen.Config, error) {
	if err := b.check(); err != nil {
		return nil, err
	}
	c := &b.load
	var err error
	if c.Limits, err = loadgen.ParseLimits(b.slo); err != nil {
		return nil, fmt.Errorf("--slo: %w", err)
	}
	if c.TokenIDs, err = loadgen.ParseIDRange(b.ids); err != nil {
		return nil, fmt.Errorf("--token-ids: %w", err)
	}
	if c.Key, err = config.ReadSecret(b.keyFile); err != nil {
		return nil, fmt.Errorf("--key-file: %w", err)
	}
	if b.trace != "" {
		if err := b.readTrace(); err != nil {
			return nil, fmt.Errorf("--trace %s: %w", b.trace, err)
		}
	}
	if b.sweep == "" {
		return []loadgen.Config{b.bounded(*c)}, nil
	}
	s, err := loadgen.ParseSweep(b.sweep)
	switch {
	case err != nil:
		return nil, fmt.Errorf("--sweep: %w", err)
	case (s.Name == loadgen.SweepSpeed) != (b.trace != ""):
		return nil, errors.New("--sweep: with --trace the speed varies, without it rate or concurrency")
	case b.given(s.Name):
		return nil, fmt.Errorf("--sweep: --%s must not be given too", s.Name)
	case s.Name == loadgen.SweepConcurrency && c.Rate > 0:
		return nil, errors.New("--sweep: of concurrency needs a run without --rate")
	}
	var runs []loadgen.Config
	for i := range s.Values {
		runs = append(runs, b.bounded(s.Config(*c, i)))
	}
	return runs, nil
}

// bounded sets the values that depend on several flags.
func (b *benchFlags) bounded(c loadgen.Config) loadgen.Config {
	if b.given("concurrency") && (c.Rate > 0 || c.Trace != nil) {
		c.MaxOpen = c.Concurrency
	}
	if c.WarmUp < 0 {
		c.WarmUp = c.Concurrency
	}
	return c
}

// traceExcludes are the flags whose values a trace determines.
var traceExcludes = []string{"rate", "turns", "think", "turn-words", "prompt-words", "shared-words", "max-tokens", "ignore-eos"}

func (b *benchFlags) readTrace() error {
	f, err := os.Open(b.trace)
	if err != nil {
		return err
	}
	defer f.Close()
	if b.load.Trace, err = replay.ReadTrace(filepath.Base(b.trace), f, b.load.BlockTokens); err != nil {
		return err
	}
	if t := b.load.Trace; t.Uneven > 0 {
		b.uneven = fmt.Sprintf("--trace %s: in %d of %d requests the hash_ids do not fit input_length; is --block-tokens that of the trace?", b.trace, t.Uneven, len(t.Requests))
		if t.Uneven > len(t.Requests)/2 {
			b.load.BlockTokens = loadgen.MeanBlock(t)
			b.uneven += fmt.Sprintf(" Blocks get their mean length of %d tokens.", b.load.BlockTokens)
		}
	}
	if !b.given("requests") {
		b.load.Requests = 0
	}
	if !b.given("api") {
		b.load.API = loadgen.APICompletions
	}
	return nil
}

// check checks the values of single flags, and the combinations of flags.
func (b *benchFlags) check() error {
	c := &b.load
	if c.URL == "" {
		return errors.New("--url is needed")
	}
	if !strings.Contains(c.URL, "://") {
		c.URL = "http://" + c.URL
	}
	u, err := url.Parse(c.URL)
	switch {
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		return errors.New("--url: want http://host:port")
	case !(c.Rate >= 0):
		return errors.New("--rate: must not be negative")
	case c.WarmUp < -1:
		return errors.New("--warm-up: must be at least -1")
	case c.Shared < 0:
		return errors.New("--shared-words: must not be negative")
	case c.Think < 0:
		return errors.New("--think: must not be negative")
	case !(c.Speed > 0):
		return errors.New("--speed: must be more than 0")
	case c.Timeout <= 0:
		return errors.New("--timeout: must be more than 0")
	}
	for flag, n := range map[string]int{"requests": c.Requests, "concurrency": c.Concurrency, "prompt-words": c.PromptWords, "max-tokens": c.MaxTokens, "turns": c.Turns, "turn-words": c.TurnWords, "block-tokens": c.BlockTokens} {
		if n < 1 {
			return fmt.Errorf("--%s: must be at least 1", flag)
		}
	}
	excluded, reason := []string{"speed", "block-tokens", "token-ids"}, "needs --trace"
	if b.trace != "" {
		excluded, reason = traceExcludes, "must not be given with --trace, which determines it"
	}
	for _, flag := range excluded {
		if b.given(flag) {
			return fmt.Errorf("--%s: %s", flag, reason)
		}
	}
	return nil
}

func (a *app) bench(b *benchFlags) error {
	configs, err := b.runs()
	if err != nil {
		return err
	}
	if b.uneven != "" {
		fmt.Fprintln(a.err, b.uneven)
	}
	var file, page *os.File // created before the load, so that a wrong path costs no run
	var lines io.Writer
	if b.output != "" {
		if file, err = os.Create(b.output); err != nil {
			return fmt.Errorf("--output: %w", err)
		}
		defer file.Close()
		lines = file
	}
	if b.html != "" {
		if page, err = os.Create(b.html); err != nil {
			return fmt.Errorf("--html: %w", err)
		}
		defer page.Close()
	}
	results, err := a.benchRuns(configs, lines)
	if file != nil {
		if cerr := file.Close(); cerr != nil {
			err = errors.Join(err, fmt.Errorf("--output: %w", cerr))
		}
	}
	if len(results) > 0 {
		err = errors.Join(a.writeBench(b, results, page), err)
	}
	if err == nil && !slices.ContainsFunc(results, func(r *loadgen.Result) bool { return r.Failed < r.Requests }) {
		err = errors.New("no request had a good answer")
	}
	return exit.Failed(err)
}

// benchRuns does the runs one after the other, until an interrupt or an error, and returns the
// results so far. It writes a line for each request to lines, unless that is nil.
func (a *app) benchRuns(configs []loadgen.Config, lines io.Writer) (results []*loadgen.Result, err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	for i, c := range configs {
		if i > 0 && ctx.Err() != nil {
			break
		}
		r, err := a.benchOnce(ctx, c)
		if err != nil {
			return results, fmt.Errorf("%s%w", prefixed(c.Label), err)
		}
		results = append(results, r)
		if lines != nil {
			if err := r.WriteSamples(lines); err != nil {
				return results, fmt.Errorf("--output: %w", err)
			}
		}
	}
	return results, nil
}

// benchOnce does one run and shows its progress.
func (a *app) benchOnce(ctx context.Context, c loadgen.Config) (*loadgen.Result, error) {
	total := c.Requests
	if c.Trace != nil && (total == 0 || total > len(c.Trace.Requests)) {
		total = len(c.Trace.Requests)
	}
	if isTerminal(a.err) {
		p := progress{out: a.err, label: c.Label, total: total, began: time.Now()}
		c.Ended = p.ended
		defer p.end()
	}
	return loadgen.Run(ctx, c)
}
