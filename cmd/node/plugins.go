package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"os"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/filters"
	"github.com/pdproxy/pdproxy/filters/stableprefix"
	"github.com/pdproxy/pdproxy/plugins"
	"github.com/pdproxy/pdproxy/plugins/filter"
	"github.com/pdproxy/pdproxy/plugins/policy"
	"github.com/pdproxy/pdproxy/plugins/source"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

var (
	_ coordinator.Decider = (*plugins.Set)(nil)
	_ attempt.Hooks       = (*plugins.Set)(nil)
	_ admin.Policies      = policyRows{}
)

// newPlugins returns an empty set of plugins and policies. Without conversations, as in a
// worker, plugins cannot store data of a conversation.
func newPlugins(cfg *config.Config, reg prometheus.Registerer, metrics *telemetry.Metrics, conversations *conversation.Table, changed func(), log *slog.Logger) (*plugins.Set, error) {
	defined := newPluginMetrics()
	if err := reg.Register(defined); err != nil {
		return nil, err
	}
	name, _ := os.Hostname()
	deps := plugins.Deps{
		Builtin:     policies.Wasm,
		Meter:       func(name, hook string) policy.Meter { return metrics.PolicyMeter(name, hook) },
		FilterMeter: func(name string) filter.Meter { return newFilterMeter(metrics, name) },
		Metrics:     defined.of,
		Node:        filter.Node{ID: name, Cluster: "pdproxy", Listener: cfg.Server.Listen},
		// Without Proxy: upstreams are called directly, even if HTTP_PROXY is set.
		Transport: &http.Transport{DisableCompression: true, MaxResponseHeaderBytes: 64 << 10, MaxIdleConnsPerHost: 64, IdleConnTimeout: 30 * time.Second},
		CacheDir:  CompileCache(log),
		Changed:   changed,
		Log:       log,
	}
	if conversations != nil { // an interface that holds a nil pointer is not nil
		deps.Conversations = conversations
	}
	return plugins.New(deps)
}

// Natives returns the compiled built-in policies in the form that package plugins uses.
func Natives(built *policies.Set) plugins.Natives {
	return plugins.Natives{
		Plan: func(name string) (func(*abi.PlanFacts) abi.PlanDecision, bool) {
			f, ok := built.Plan(name)
			return f, ok
		},
		Place: func(name string) (func(*abi.PlaceFacts) abi.PlaceDecision, bool) {
			f, ok := built.Place(name)
			return f, ok
		},
		Mint: func(name string) (func(*abi.MintFacts) uint64, bool) {
			f, ok := built.Mint(name)
			return f, ok
		},
		Retain: func(name string) (func(*abi.RetainFacts) abi.RetainDecision, bool) {
			f, ok := built.Retain(name)
			return f, ok
		},
		Score: nativeScorer,
		Evict: func(name string) (func(*abi.EvictFacts) int32, bool) {
			f, ok := built.Evict(name)
			return f, ok
		},
		Needs: built.Needs,
	}
}

// applyPlugins puts the plugins and policies of cfg into use in a process of that role. A
// coordinator has no filters, because no client calls it. If a plugin or policy cannot be
// used, applyPlugins changes nothing and returns an error with the key and its line.
// memory counts the memory of filters; nil: it is not counted.
func applyPlugins(set *plugins.Set, cfg *config.Config, role Role, memory *buffer.Budget) error {
	c, err := pluginConfig(cfg)
	if err != nil {
		return err
	}
	if memory != nil {
		c.Limits.Memory = memory
	}
	if role == RoleCoordinator {
		c.Plugins = slices.DeleteFunc(c.Plugins, func(s plugins.Spec) bool { return s.Filter })
	}
	err = set.Apply(context.Background(), c)
	var wrong plugins.Errors
	if !errors.As(err, &wrong) {
		return err
	}
	var problems config.Problems
	for _, e := range wrong {
		problems = append(problems, cfg.Problem(e.Key, e.Err.Error()))
	}
	return problems
}

// pluginConfig converts cfg to the configuration of package plugins.
func pluginConfig(cfg *config.Config) (plugins.Config, error) {
	params := policies.Params(cfg.Policy.Params)
	built, err := policies.New(params)
	if err != nil {
		return plugins.Config{}, paramProblems(cfg)
	}
	c := plugins.Config{
		Natives: Natives(built), Params: params.Text(),
		Upstreams: make(map[string]*url.URL),
		Plan:      slices.Clone(cfg.Policy.Order), Place: cfg.Policy.Place, Mint: cfg.Policy.Mint, Retain: cfg.Policy.Retain,
		Native: cfg.Policy.Runtime == "native",
		Budget: time.Duration(cfg.Timeouts.Policy),
		Limits: filter.Limits{MaxBody: int64(cfg.Server.MaxBody), ReadTimeout: time.Duration(cfg.Server.ReadTimeout)},
	}
	if cfg.Policy.Evict != config.EvictNone {
		c.Evict = cfg.Policy.Evict
	}
	if !slices.Contains(c.Plan, cfg.Policy.Plan) {
		c.Plan = append(c.Plan, cfg.Policy.Plan)
	}
	for i, u := range cfg.Upstreams {
		parsed, err := url.Parse(u.URL)
		if err != nil {
			return c, config.Problems{cfg.Problem(fmt.Sprintf("upstream[%d].url", i), "invalid URL")}
		}
		c.Upstreams[u.Name] = parsed
	}
	if problems := filterProblems(cfg); len(problems) > 0 {
		return c, problems
	}
	if err := AddScores(&c, cfg); err != nil {
		return c, err
	}
	for _, p := range cfg.Plugins {
		c.Plugins = append(c.Plugins, PluginSpec(&p))
	}
	return c, nil
}

// filterProblems returns the problem of the configuration text of each built-in filter.
func filterProblems(cfg *config.Config) config.Problems {
	var problems config.Problems
	for i, p := range cfg.Plugins {
		name, _ := p.Builtin()
		err := filters.Check(name, p.Config)
		if err == nil {
			continue
		}
		text := err.Error()
		var wrong *stableprefix.Error
		if errors.As(err, &wrong) {
			text += config.DidYouMean(wrong.Name, wrong.Known)
		}
		problems = append(problems, cfg.Problem(fmt.Sprintf("plugin[%d].config", i), text))
	}
	return problems
}

// paramProblems returns the problem of each parameter in [policy.params].
func paramProblems(cfg *config.Config) config.Problems {
	var problems config.Problems
	for _, policy := range slices.Sorted(maps.Keys(cfg.Policy.Params)) {
		if _, err := policies.New(policies.Params{policy: nil}); err != nil {
			problems = append(problems, cfg.Problem("policy.params."+policy, err.Error()))
			continue
		}
		params := cfg.Policy.Params[policy]
		for _, name := range slices.Sorted(maps.Keys(params)) {
			if _, err := policies.New(policies.Params{policy: {name: params[name]}}); err != nil {
				problems = append(problems, cfg.Problem(config.ParamKey(policy, name), err.Error()))
			}
		}
	}
	return problems
}

// PluginSpec converts a [[plugin]] to the form of package plugins.
func PluginSpec(p *config.Plugin) plugins.Spec {
	builtin, _ := p.Builtin()
	return plugins.Spec{
		Name: p.Name, Source: source.Source{Location: p.Path, Module: filters.Module(builtin), SHA256: p.SHA256, PublicKey: p.PublicKey, Signature: p.Signature}, Filter: p.Phase == config.PhaseFilter,
		Trusted: p.Trusted, MemoryPages: uint32(p.Memory / host.PageSize), HostMemory: int64(p.HostMemory), Timeout: time.Duration(p.Timeout),
		// Never nil: nil would allow everything.
		HostFunctions: append([]string{}, p.HostFunctions...), Upstreams: append([]string{}, p.Upstreams...),
		Config: p.Config, VMConfig: p.VMConfig, VMID: p.VMID, RootID: p.RootID,
		FailOpen: p.Fail == "open", HoldHeaders: p.HeaderStop == "headers",
		Canary: p.Canary, CrashBudget: p.CrashBudget, CrashWindow: time.Duration(p.CrashWindow),
	}
}

// policyRows shows a set of plugins on the admin address.
type policyRows struct{ *plugins.Set }

// List implements admin.Policies.
func (p policyRows) List() []admin.PolicyRow {
	rows := []admin.PolicyRow{}
	for _, r := range p.Rows() {
		rows = append(rows, admin.PolicyRow{
			Name: r.Name, Phase: r.Phase, VersionSHA256: r.SHA256, Runtime: r.Runtime, State: r.State,
			Calls: r.Calls, Failures: r.Failures, MeanUS: r.MeanUS, P99US: r.P99US,
		})
	}
	return rows
}

// Reload implements admin.Policies.
func (p policyRows) Reload(name string) error {
	err := p.Set.Reload(context.Background(), name)
	if errors.Is(err, plugins.ErrUnknown) {
		return fmt.Errorf("reload %q: %w", name, admin.ErrUnknownPolicy)
	}
	return err
}
