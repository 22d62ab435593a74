package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// CheckFiles reads all files that cfg names. It opens no socket and calls no engine. An
// error of type config.Problems names the keys.
func CheckFiles(cfg *config.Config) error {
	if _, err := loadFiles(cfg, slog.New(slog.DiscardHandler)); err != nil {
		return err
	}
	return checkEngineList(cfg.Discovery.File.Path)
}

// checkEngineList reads the file of discovery.file.path; "" for none.
func checkEngineList(path string) error {
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
	for _, p := range config.AsProblems(err) {
		message := p.Message
		if p.Key != "" {
			message = fmt.Sprintf("%s line %d: %s: %s", path, p.Line, p.Key, p.Message)
		}
		problems = append(problems, config.Problem{Key: "discovery.file.path", Message: message})
	}
	return problems
}

// CheckPlugins starts and configures the plugins and policies of cfg, and ends them again.
func CheckPlugins(cfg *config.Config, log *slog.Logger) error {
	reg := prometheus.NewRegistry()
	set, err := newPlugins(cfg, reg, telemetry.New(reg), conversation.New(1), nil, log)
	if err != nil {
		return exit.Failed(err)
	}
	return errors.Join(applyPlugins(set, cfg, RoleSingle, nil), set.Close(context.Background()))
}
