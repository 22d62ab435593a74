package node

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine/discovery"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// CheckFiles reads all files that cfg names, and the files that the list of engines in
// discovery.file.path names. For a file that the proxy writes, CheckFiles checks that the
// folder exists. It opens no socket, calls no engine and creates no file. The error is of
// type config.Problems and has the problems of all files.
func CheckFiles(cfg *config.Config) error {
	var problems config.Problems
	if _, err := loadFiles(cfg, slog.New(slog.DiscardHandler)); err != nil {
		problems = append(problems, config.AsProblems(err)...)
	}
	noteWrittenFiles(cfg, func(key string, err error) { problems = append(problems, fileProblems(cfg, key, err)...) })
	problems = append(problems, checkEngineList(cfg)...)
	if len(problems) > 0 {
		return problems
	}
	return nil
}

// checkEngineList reads the file of discovery.file.path, and the files that its engines
// name. The problems in it have the name of that file.
func checkEngineList(cfg *config.Config) (problems config.Problems) {
	path := cfg.Discovery.File.Path
	if path == "" {
		return nil
	}
	data, err := discovery.ReadFile(path)
	if err != nil {
		return config.Problems{cfg.Problem("discovery.file.path", err.Error())}
	}
	list, err := config.ParseEngineFile(path, data)
	if err != nil {
		return config.AsProblems(err)
	}
	noteEngineFiles(list.Engines, func(key string, err error) { problems = append(problems, fileProblems(list, key, err)...) })
	return problems
}

// CheckPlugins starts and configures the plugins and policies of cfg, and ends them again.
// An error of type config.Problems has the problems of all plugins and parameters.
func CheckPlugins(cfg *config.Config, log *slog.Logger) error {
	reg := prometheus.NewRegistry()
	set, err := newPlugins(cfg, reg, telemetry.New(reg), conversation.New(1), nil, log)
	if err != nil {
		return exit.Failed(err)
	}
	problems := paramProblems(cfg)
	if len(problems) > 0 { // the plugins have their own problems
		c := *cfg
		c.Policy.Params = nil
		cfg = &c
	}
	if err := applyPlugins(set, cfg, RoleSingle, nil); err != nil {
		problems = append(problems, config.AsProblems(err)...)
	}
	if err := set.Close(context.Background()); err != nil {
		return exit.Failed(err)
	}
	if len(problems) > 0 {
		return problems
	}
	return nil
}
