package cmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"os/signal"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/conformance/load"
	"github.com/pdproxy/pdproxy/proxy/config"
)

func (a *app) benchCommand() *cobra.Command {
	var c load.Config
	var keyFile string
	cmd := &cobra.Command{
		Use:   "bench --url URL",
		Short: "Send load to an OpenAI endpoint and measure the latency for clients",
		Long: `Send load to an OpenAI endpoint and measure time to first token (TTFT), time
between events with text (ITL; an event may contain several tokens), time of whole
answers, and throughput.

All requests ask for streams. With --rate, requests start at random times, whatever
the number of open requests. Without --rate, --concurrency requests are always open.
The same flags send the same prompts. The times cover only successful answers; the
exit code is 1 if there are none. An interrupt ends the run and prints the results
so far. Standard error shows the progress.`,
		Example: `  pdproxy bench --url http://127.0.0.1:8080
  pdproxy bench --url http://127.0.0.1:8080 --rate 20 --requests 1000 --prompt-words 2000 --json`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := checkBench(&c); err != nil {
				return err
			}
			var err error
			if c.Key, err = config.ReadSecret(keyFile); err != nil {
				return fmt.Errorf("--key-file: %w", err)
			}
			return a.bench(c)
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.URL, "url", "", "endpoint: http://host:port, host:port, or OpenAI's base URL that ends in /v1")
	f.StringVar(&c.API, "api", load.APIChat, load.APIChat+" or "+load.APICompletions)
	f.StringVar(&c.Model, "model", "", "model to name; default the first of /v1/models")
	f.StringVar(&keyFile, "key-file", "", "file with the API key")
	f.IntVar(&c.Requests, "requests", 100, "requests to send and measure")
	f.IntVar(&c.WarmUp, "warm-up", -1, "requests to send before, without measuring them; -1: as many as --concurrency")
	f.IntVar(&c.Concurrency, "concurrency", 8, "concurrent requests")
	f.Float64Var(&c.Rate, "rate", 0, "requests per second at random times, instead of --concurrency")
	f.IntVar(&c.PromptWords, "prompt-words", 256, "words of a prompt; the tokenizer determines how many tokens a word has, and the results show the prompt tokens")
	f.IntVar(&c.Shared, "shared-words", 0, "words at the beginning of all prompts")
	f.IntVar(&c.MaxTokens, "max-tokens", 64, "most tokens of an answer")
	f.BoolVar(&c.IgnoreEOS, "ignore-eos", false, "ask for answers of exactly --max-tokens (vLLM, SGLang)")
	f.DurationVar(&c.Timeout, "timeout", 5*time.Minute, "limit of one request")
	f.Uint64Var(&c.Seed, "seed", 1, "seed of the prompts and the times")
	return a.addJSON(cmd)
}

// checkBench checks the flags.
func checkBench(c *load.Config) error {
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
	case c.API != load.APIChat && c.API != load.APICompletions:
		return fmt.Errorf("--api: %q is not %s or %s", c.API, load.APIChat, load.APICompletions)
	case c.Rate < 0:
		return errors.New("--rate: must not be negative")
	case c.WarmUp < -1:
		return errors.New("--warm-up: must be at least -1")
	case c.Shared < 0:
		return errors.New("--shared-words: must not be negative")
	}
	for flag, n := range map[string]int{"requests": c.Requests, "concurrency": c.Concurrency, "prompt-words": c.PromptWords, "max-tokens": c.MaxTokens} {
		if n < 1 {
			return fmt.Errorf("--%s: must be at least 1", flag)
		}
	}
	if c.Timeout <= 0 {
		return errors.New("--timeout: must be more than 0")
	}
	if c.WarmUp < 0 {
		c.WarmUp = c.Concurrency
	}
	return nil
}

func (a *app) bench(c load.Config) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	p := progress{out: a.err, total: c.Requests, began: time.Now()}
	c.Ended = p.ended
	r, err := load.Run(ctx, c)
	if err != nil {
		return exit.Failed(err)
	}
	if a.json {
		err = a.printJSON(r)
	} else {
		err = a.printBench(r)
	}
	if err == nil && r.Failed == r.Requests {
		err = errors.New("no request had a good answer")
	}
	return exit.Failed(err)
}

// progress shows how far a run is, in one line every few seconds.
type progress struct {
	out          io.Writer
	total        int
	began, shown time.Time
	done, failed int
}

// showEvery is the time between two lines.
const showEvery = 5 * time.Second

// ended counts a request. Its calls do not overlap.
func (p *progress) ended(failed bool) {
	p.done++
	if failed {
		p.failed++
	}
	now := time.Now()
	if p.shown.IsZero() {
		p.shown = p.began
	}
	if now.Sub(p.shown) < showEvery {
		return
	}
	p.shown = now
	fmt.Fprintf(p.out, "%.0f s: %d of %d requests, %d failed\n", now.Sub(p.began).Seconds(), p.done, p.total, p.failed)
}

func (a *app) printBench(r *load.Result) error {
	fmt.Fprintf(a.out, "%d requests in %.1f s, %d failed\n", r.Requests, r.Seconds, r.Failed)
	for _, reason := range slices.Sorted(maps.Keys(r.Failures)) {
		fmt.Fprintf(a.out, "  %s: %d\n", reason, r.Failures[reason])
	}
	fmt.Fprintf(a.out, "%.1f requests/s, %.0f output tokens/s; %d prompt tokens (%d cached), %d output tokens\n\n",
		r.Throughput, r.OutputThroughput, r.PromptTokens, r.CachedTokens, r.OutputTokens)
	w := tabwriter.NewWriter(a.out, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "ms\tmean\tp50\tp90\tp95\tp99\tmax\t")
	for _, row := range []struct {
		name string
		s    load.Spread
	}{{"TTFT", r.TTFT}, {"ITL", r.ITL}, {"whole", r.Total}} {
		fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t\n", row.name, row.s.Mean, row.s.P50, row.s.P90, row.s.P95, row.s.P99, row.s.Max)
	}
	return w.Flush()
}
