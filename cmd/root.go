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
	"runtime"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

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
	// The ballast lets the process allocate 8 MiB more between two garbage collections. Go collects when
	// as much has been allocated as was in use, which is too often for a proxy that uses little. Nothing
	// writes to the ballast, so it takes no memory (docs/performance.md).
	if os.Getenv("GOGC") == "" {
		ballast := make([]byte, 8<<20)
		defer runtime.KeepAlive(ballast)
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
	code := exit.Usage
	var withCode *exit.Error
	if errors.As(err, &withCode) {
		code = withCode.Code
	}
	var problems config.Problems
	if !errors.As(err, &problems) {
		fmt.Fprintln(stderr, "pdproxy:", printableLines(err.Error()))
		return code
	}
	for _, p := range problems {
		fmt.Fprint(stderr, plain("pdproxy: %s\n", p))
	}
	return code
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "pdproxy",
		Short: "Coordinate prefill and decode in front of LLM serving engines",
		Long: `pdproxy coordinates prefill and decode in front of LLM serving engines.

Start here: pdproxy demo
It runs simulated engines and the proxy in one process, and prints requests to try.`,
		Example: `  pdproxy demo                  # simulated engines and the proxy
  pdproxy check config.toml     # every problem of a configuration, with its line
  pdproxy run config.toml       # serve`,
		Version:               Version,
		SilenceErrors:         true,
		DisableFlagsInUseLine: true,
		SilenceUsage:          true,
		PersistentPreRunE:     func(c *cobra.Command, _ []string) error { return a.checkJSON(c) },
		RunE:                  func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.SetVersionTemplate(readVersion().String() + "\n")
	// The root accepts these flags, so that they may stand before the name of a command.
	// The commands that use them list them: see addJSON and addLog.
	flags := root.PersistentFlags()
	a.jsonFlag(flags)
	a.logFlags(root, flags)
	for _, name := range []string{"json", "log-level", "log-format"} {
		flags.Lookup(name).Hidden = true
	}
	root.SetFlagErrorFunc(flagError)
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	root.AddCommand(a.runCommand(), a.childCommand(), a.checkCommand(), a.doctorCommand(), a.demoCommand(), a.simCommand(), a.replayCommand(), a.benchCommand(), a.explainCommand(), a.statusCommand(), a.adminTokenCommand(), a.keysCommand(), a.importCommand(), a.quickstartCommand(), a.pluginCommand(), a.versionCommand())
	completeTree(root)
	return root
}

func (a *app) jsonFlag(f *pflag.FlagSet) {
	f.BoolVar(&a.json, "json", false, "print results as JSON")
}

func (a *app) logFlags(c *cobra.Command, f *pflag.FlagSet) {
	f.StringVar(&a.logLevel, "log-level", "info", "lowest level of the log: %s")
	f.StringVar(&a.logFormat, "log-format", "text", "format of the log: %s")
	choose(c, f, "log-level", choice{allowed: []string{"debug", "info", "warn", "error"}})
	choose(c, f, "log-format", choice{allowed: []string{"text", "json"}})
}

// addJSON returns c with --json, for a command that prints a result.
func (a *app) addJSON(c *cobra.Command) *cobra.Command {
	a.jsonFlag(c.Flags())
	return c
}

// addLog returns c with the flags of the log, for a command that writes one.
func (a *app) addLog(c *cobra.Command) *cobra.Command {
	a.logFlags(c, c.Flags())
	return c
}

// checkJSON rejects --json for a command that prints no result.
func (a *app) checkJSON(c *cobra.Command) error {
	if a.json && c.LocalNonPersistentFlags().Lookup("json") == nil {
		return fmt.Errorf("--json: %s prints no result", c.CommandPath())
	}
	return nil
}

// arguments requires exactly the named arguments. Its error names the missing argument.
func arguments(names ...string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) == len(names) {
			return nil
		}
		problem := "which " + strings.Join(names[min(len(args), len(names)):], " and ") + "?"
		if len(args) > len(names) {
			problem = fmt.Sprintf("unexpected argument %q", args[len(names)])
		}
		return fmt.Errorf("%s: %s\nusage: %s", strings.TrimPrefix(c.CommandPath(), "pdproxy "), problem, c.UseLine())
	}
}

// logger returns the log that the global flags describe.
func (a *app) logger() (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(a.logLevel)); err != nil {
		return nil, fmt.Errorf("--log-level: %w", err)
	}
	opts := &slog.HandlerOptions{Level: level}
	if a.logFormat == "json" {
		return slog.New(slog.NewJSONHandler(a.err, opts)), nil
	}
	return slog.New(slog.NewTextHandler(a.err, opts)), nil
}

func (a *app) printJSON(v any) error {
	e := json.NewEncoder(a.out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}
