package cmd

import (
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/proxy/config"
)

func (a *app) checkCommand() *cobra.Command {
	strict := false
	c := &cobra.Command{
		Use:   "check config.toml",
		Short: "Validate a configuration and start its plugins, without calls to engines",
		Example: `  pdproxy check config.toml
  pdproxy check --strict --json config.toml     # for CI`,
		Args: arguments("config.toml"),
		RunE: func(_ *cobra.Command, args []string) error { return a.check(args[0], strict) },
	}
	c.Flags().BoolVar(&strict, "strict", false, "fail for warnings too, such as no engine, or two engines of one URL")
	return a.addJSON(a.addLog(c))
}

type checkResult struct {
	OK       bool             `json:"ok"`
	Problems []config.Problem `json:"problems"`
	Warnings []config.Problem `json:"warnings"`
}

// check checks a file. With strict, a warning is a failure too.
func (a *app) check(path string, strict bool) error {
	log, err := a.logger()
	if err != nil {
		return err
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	cfg, problems := config.Draft(path, data)
	if cfg != nil {
		problems = checkRest(cfg, problems, log)
	}
	res := checkResult{Problems: append([]config.Problem{}, problems...), Warnings: []config.Problem{}}
	if len(problems) == 0 {
		res.Warnings = append(res.Warnings, cfg.Warnings()...)
	}
	res.OK = len(problems) == 0 && (!strict || len(res.Warnings) == 0)
	if a.json {
		err = a.printJSON(res)
	} else {
		for _, w := range res.Warnings {
			fmt.Fprintln(a.err, "warning:", w)
		}
		if res.OK {
			_, err = fmt.Fprintln(a.out, "ok")
		}
	}
	switch {
	case err != nil:
		return exit.Failed(err)
	case len(problems) > 0:
		return problems
	case !res.OK:
		return fmt.Errorf("%s: --strict: warnings: %d", path, len(res.Warnings))
	}
	return nil
}

// checkRest adds the problems of the files and plugins that cfg names to those of cfg
// itself. It leaves out a problem of a key that has one already, or has one of its own keys:
// the later problem follows from the earlier one.
func checkRest(cfg *config.Config, problems config.Problems, log *slog.Logger) config.Problems {
	has := func(key string) bool {
		return slices.ContainsFunc(problems, func(p config.Problem) bool {
			return key != "" && (p.Key == key || strings.HasPrefix(p.Key, key+"."))
		})
	}
	checks := []func() error{func() error { return node.CheckFiles(cfg) }}
	if !has("timeouts.policy") { // without this limit no plugin starts
		checks = append(checks, func() error { return node.CheckPlugins(cfg, log) })
	}
	for _, check := range checks {
		err := check()
		if err == nil {
			continue
		}
		var more config.Problems
		for _, p := range config.AsProblems(err) {
			if !has(p.Key) {
				more = append(more, p)
			}
		}
		problems = append(problems, more...)
	}
	problems.Sort()
	return problems
}

// loadConfig reads and checks a configuration file.
func loadConfig(path string) (*config.Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	cfg, err := config.ParseFile(path, data)
	if err != nil {
		return nil, err
	}
	return &cfg, nil
}
