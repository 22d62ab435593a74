package cmd

import (
	"context"
	"log/slog"
	"net/http"
	"path/filepath"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/plugins"
	"github.com/pdproxy/pdproxy/plugins/policy"
	"github.com/pdproxy/pdproxy/plugins/source"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
)

// placer is a set of plugins with one place policy.
type placer struct{ set *plugins.Set }

// replayBudget is the time limit of a decision. It is long, because a decision
// that is late by chance would make two runs differ.
const replayBudget = 10 * time.Second

// newPlacer loads the policies that place and retain, each a built-in one or one of a module. Sets of
// scorers place too.
func (r *replayFlags) newPlacer(name, retain string, params policies.Params, log *slog.Logger) (*placer, error) {
	built, err := policies.New(params)
	if err != nil {
		return nil, err
	}
	cfg := plugins.Config{
		Natives: node.Natives(built), Params: params.Text(), Plan: []string{"auto"}, Mint: "snowflake",
		Budget: replayBudget,
	}
	cfg.Place = addPlugin(&cfg, name)
	cfg.Native = r.runtime == "native" || len(cfg.Plugins) > 0 // a policy of a module needs no module of built-in ones
	cfg.Retain = addPlugin(&cfg, retain)
	if isScores(name) {
		if err := r.addScores(&cfg, name); err != nil {
			return nil, err
		}
	}
	set, err := plugins.New(plugins.Deps{
		Builtin:       policies.Wasm,
		Meter:         func(string, string) policy.Meter { return nopMeter{} },
		Conversations: conversation.New(0),
		Transport:     http.DefaultTransport,
		CacheDir:      node.CompileCache(log),
		Log:           log,
	})
	if err != nil {
		return nil, err
	}
	if err := set.Apply(context.Background(), cfg); err != nil {
		set.Close(context.Background())
		return nil, err
	}
	return &placer{set}, nil
}

// addPlugin adds the module of FILE.wasm or FILE.wasm/NAME to cfg and returns the name of its policy. Another name is
// that of a built-in policy.
func addPlugin(cfg *plugins.Config, name string) string {
	path, in, isFile := cutWasm(name)
	if !isFile {
		return name
	}
	plugin := strings.TrimSuffix(filepath.Base(path), wasmSuffix)
	for _, other := range cfg.Plugins {
		switch {
		case other.Source.Location == path:
			return other.Name + in
		case other.Name == plugin:
			plugin += "-2"
		}
	}
	cfg.Plugins = append(cfg.Plugins, plugins.Spec{
		Name: plugin, Source: source.Source{Location: path},
		HostFunctions: []string{"*"}, MemoryPages: 64 << 20 / host.PageSize,
		CrashBudget: 20, CrashWindow: 10 * time.Second,
	})
	return plugin + in
}

const wasmSuffix = ".wasm"

// cutWasm splits FILE.wasm/NAME. in is "/NAME", or "" without a name.
func cutWasm(name string) (path, in string, ok bool) {
	if strings.HasSuffix(name, wasmSuffix) {
		return name, "", true
	}
	if i := strings.LastIndex(name, wasmSuffix+"/"); i >= 0 {
		i += len(wasmSuffix)
		return name[:i], name[i:], true
	}
	return name, "", false
}

// Place implements replay.Placer.
func (p *placer) Place(f *abi.PlaceFacts) (abi.PlaceDecision, bool) {
	d, _, ok := p.set.Place(context.Background(), f)
	return d, ok
}

// Needs implements replay.Placer.
func (p *placer) Needs() abi.Needs { return p.set.Needs() }

// nopMeter ignores the calls.
type nopMeter struct{}

func (nopMeter) Observe(time.Duration) {}
func (nopMeter) Fail(string)           {}
