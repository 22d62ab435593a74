package cmd

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/proxy/config"
)

func (a *app) checkCommand() *cobra.Command {
	return a.addJSON(a.addLog(&cobra.Command{
		Use:   "check config.toml",
		Short: "Validate a configuration and start its plugins, without calls to engines",
		Example: `  pdproxy check config.toml
  pdproxy check --json config.toml     # for CI and editors`,
		Args: arguments("config.toml"),
		RunE: func(_ *cobra.Command, args []string) error { return a.check(args[0]) },
	}))
}

type checkResult struct {
	OK       bool             `json:"ok"`
	Problems []config.Problem `json:"problems"`
	Warnings []config.Problem `json:"warnings"`
}

func (a *app) check(path string) error {
	cfg, err := loadConfig(path)
	if err == nil {
		err = node.CheckFiles(cfg)
	}
	if err == nil {
		err = a.checkPlugins(cfg)
	}
	if a.json {
		res := checkResult{OK: err == nil, Problems: []config.Problem{}, Warnings: []config.Problem{}}
		if err == nil {
			res.Warnings = append(res.Warnings, cfg.Warnings()...)
		} else {
			res.Problems = append(res.Problems, config.AsProblems(err)...)
		}
		if perr := a.printJSON(res); perr != nil {
			return exit.Failed(perr)
		}
		return err
	}
	if err != nil {
		return err
	}
	for _, w := range cfg.Warnings() {
		fmt.Fprintln(a.err, "warning:", w)
	}
	fmt.Fprintln(a.out, "ok")
	return nil
}

// checkPlugins starts the plugins and stops them again.
func (a *app) checkPlugins(cfg *config.Config) error {
	log, err := a.logger()
	if err != nil {
		return err
	}
	return node.CheckPlugins(cfg, log)
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
