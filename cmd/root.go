// Package cmd is the command line. Each command is a thin layer over another package; the
// processes that serve are those of cmd/supervisor and cmd/node. Results go to standard
// output, logs to standard error.
package cmd

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// app holds the outputs and the global flags, which all commands use.
type app struct {
	out, err  io.Writer
	json      bool
	logLevel  string
	logFormat string
}

// Main runs one command line and returns its exit code.
func Main(args []string, stdout, stderr io.Writer) int {
	// Go's smallest heap of 4 MiB would make garbage collections too frequent for requests
	// that take microseconds (docs/reference/performance.md).
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
	a := &app{out: stdout, err: stderr}
	root := a.root()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.Execute()
	if err == nil {
		return exit.OK
	}
	var problems config.Problems
	if errors.As(err, &problems) {
		for _, p := range problems {
			fmt.Fprintln(stderr, "pdproxy:", p)
		}
		return exit.Usage
	}
	fmt.Fprintln(stderr, "pdproxy:", err)
	var withCode *exit.Error
	if errors.As(err, &withCode) {
		return withCode.Code
	}
	return exit.Usage
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:           "pdproxy",
		Short:         "Coordinate prefill and decode in front of LLM serving engines",
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.CompletionOptions.DisableDefaultCmd = true
	flags := root.PersistentFlags()
	flags.BoolVar(&a.json, "json", false, "print results as JSON")
	flags.StringVar(&a.logLevel, "log-level", "info", "debug, info, warn or error")
	flags.StringVar(&a.logFormat, "log-format", "text", "text or json")
	root.AddCommand(a.runCommand(), a.childCommand(), a.checkCommand(), a.demoCommand(), a.simCommand(), a.replayCommand(), a.benchCommand(), a.explainCommand(), a.adminTokenCommand(), a.importCommand(), a.quickstartCommand(), a.pluginCommand(), a.versionCommand())
	return root
}

// logger returns the log that the global flags describe.
func (a *app) logger() (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(a.logLevel)); err != nil {
		return nil, fmt.Errorf("--log-level: %q is not debug, info, warn or error", a.logLevel)
	}
	opts := &slog.HandlerOptions{Level: level}
	switch a.logFormat {
	case "text":
		return slog.New(slog.NewTextHandler(a.err, opts)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(a.err, opts)), nil
	}
	return nil, fmt.Errorf("--log-format: %q is not text or json", a.logFormat)
}

func (a *app) printJSON(v any) error {
	e := json.NewEncoder(a.out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}
