package cmd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

func (a *app) checkCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "check config.toml",
		Short: "Validate a configuration and start its plugins; probes nothing",
		Args:  cobra.ExactArgs(1),
		RunE:  func(_ *cobra.Command, args []string) error { return a.check(args[0]) },
	}
}

type checkResult struct {
	OK       bool             `json:"ok"`
	Problems []config.Problem `json:"problems"`
	Warnings []config.Problem `json:"warnings"`
}

func (a *app) check(path string) error {
	cfg, err := loadConfig(path)
	if err == nil {
		_, err = loadFiles(cfg, slog.New(slog.DiscardHandler))
	}
	if err == nil {
		err = checkEngines(cfg.Discovery.File.Path)
	}
	if err == nil {
		err = a.tryPlugins(cfg)
	}
	if a.json {
		res := checkResult{OK: err == nil, Problems: []config.Problem{}, Warnings: []config.Problem{}}
		if err == nil {
			res.Warnings = append(res.Warnings, cfg.Warnings()...)
		} else {
			res.Problems = append(res.Problems, asProblems(err)...)
		}
		if perr := a.printJSON(res); perr != nil {
			return failed(perr)
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

// checkEngines reads the list of engines that would be watched; "" is none.
func checkEngines(path string) error {
	if path == "" {
		return nil
	}
	data, err := os.ReadFile(path)
	if err == nil {
		_, err = config.ParseEngines(data)
	}
	if err == nil {
		return nil
	}
	var problems config.Problems
	for _, p := range asProblems(err) {
		message := p.Message
		if p.Key != "" {
			message = fmt.Sprintf("%s line %d: %s: %s", path, p.Line, p.Key, p.Message)
		}
		problems = append(problems, config.Problem{Key: "discovery.file.path", Message: message})
	}
	return problems
}

// tryPlugins starts and configures the plugins and ends them again.
func (a *app) tryPlugins(cfg *config.Config) error {
	log, err := a.logger()
	if err != nil {
		return err
	}
	reg := prometheus.NewRegistry()
	set, err := newPlugins(cfg, reg, telemetry.New(reg), conversation.New(1), nil, log)
	if err != nil {
		return failed(err)
	}
	return errors.Join(applyPlugins(set, cfg, RoleSingle, nil), set.Close(context.Background()))
}

// loadConfig reads and checks a configuration file.
func loadConfig(path string) (*config.Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	cfg, err := config.Parse(data)
	if err != nil {
		return nil, err
	}
	return &cfg, nil
}
