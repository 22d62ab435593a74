package cmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/plugins/trial"
)

func (a *app) pluginTestCommand() *cobra.Command {
	var o trial.Options
	var level string
	var upstreams map[string]string
	c := &cobra.Command{
		Use:   "test FILE.wasm FRAMES.json",
		Short: "Run a module on recorded frames; print decisions and cost",
		Long: `Run the hooks of a policy on recorded facts, or a filter on recorded requests.
Print each decision and its cost.

FRAMES.json holds frames (see docs/reference/plugin-frames.md), or the output of "pdproxy explain
--json". The exit code is 1 if a frame failed: the guest trapped or was late, its
answer breaks the contract, or the frame expects another answer.`,
		Example: `  pdproxy plugin test my-router/my-router.wasm my-router/frames.json
  pdproxy plugin test --repeat 1000 my-router/my-router.wasm my-router/frames.json`,
		Args: arguments("FILE.wasm", "FRAMES.json"),
		RunE: func(_ *cobra.Command, args []string) error {
			if o.Repeat < 1 || o.Timeout <= 0 {
				return errors.New("--repeat and --timeout: at least 1, more than 0")
			}
			lowest, err := host.ParseLogLevel(level)
			if err != nil {
				return fmt.Errorf("--guest-log: %w", err)
			}
			o.Log = a.guestLog(lowest)
			if o.Upstreams, err = parseUpstreams(upstreams); err != nil {
				return err
			}
			return a.pluginTest(args[0], args[1], o)
		},
	}
	c.Flags().StringVar(&o.Config, "config", "", "the plugin's configuration, as in [[plugin]] config")
	c.Flags().StringToStringVar(&upstreams, "upstream", nil, "NAME=URL of an upstream that a filter may call, as in [[upstream]]")
	c.Flags().DurationVar(&o.Timeout, "timeout", time.Second, "limit of one call (the defaults of the proxy are 5ms for policies and 1s for filters)")
	c.Flags().IntVar(&o.Repeat, "repeat", 1, "calls of each frame; the output shows their mean time")
	c.Flags().BoolVar(&o.Trusted, "trusted", false, "as with trusted = true: code without checks, which cannot be interrupted")
	c.Flags().StringVar(&level, "guest-log", "info", "lowest level of the guest's log: %s")
	chooseOf(c, "guest-log", host.LogLevels()...)
	return a.addJSON(c)
}

func parseUpstreams(texts map[string]string) (map[string]*url.URL, error) {
	upstreams := make(map[string]*url.URL, len(texts))
	for name, text := range texts {
		u, err := url.Parse(text)
		if err != nil {
			return nil, fmt.Errorf("--upstream %s: %w", name, err)
		}
		upstreams[name] = u
	}
	return upstreams, nil
}

// guestLog returns a log on standard error for the guests' lines of a level or
// above.
func (a *app) guestLog(lowest host.LogLevel) *slog.Logger {
	return slog.New(slog.NewTextHandler(a.err, &slog.HandlerOptions{Level: lowest.Slog()}))
}

func (a *app) pluginTest(modulePath, framesPath string, o trial.Options) error {
	wasm, err := os.ReadFile(modulePath)
	if err != nil {
		return err
	}
	file, err := os.Open(framesPath)
	if err != nil {
		return err
	}
	defer file.Close()
	frames, err := trial.ReadFrames(file)
	if err != nil {
		return fmt.Errorf("%s: %w", framesPath, err)
	}
	results, err := trial.Run(context.Background(), wasm, frames, o)
	if err != nil {
		return exit.Failed(fmt.Errorf("test %s: %w", modulePath, err))
	}
	if a.json {
		err = a.printJSON(results)
	} else {
		err = printResults(a.out, results)
	}
	bad := 0
	for _, r := range results {
		if r.Error != "" {
			bad++
		}
	}
	if bad > 0 {
		err = fmt.Errorf("test %s: %d of %d frames failed", modulePath, bad, len(results))
	}
	return exit.Failed(err)
}

func printResults(out io.Writer, results []trial.Result) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "FRAME\tHOOK\tDECISION\tUS\tERROR")
	for _, r := range results {
		name, problem := r.Name, r.Error
		if name == "" {
			name = fmt.Sprint(r.Frame)
		}
		if problem == "" {
			problem = "-"
		}
		decision, _ := json.Marshal(r.Decision)
		if d, ok := r.Decision.(fmt.Stringer); ok { // one line, where JSON would have many
			decision = []byte(d.String())
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%.1f\t%s\n", name, r.Hook, decision, r.US, problem)
		for _, note := range r.Notes {
			fmt.Fprintf(w, "\t\tnote: %s\t\t\n", note)
		}
		for line := range strings.Lines(r.Stack) {
			fmt.Fprintf(w, "\t\tat %s\t\t\n", strings.TrimSpace(line))
		}
	}
	return w.Flush()
}
