package plugins

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/budget"
	"github.com/pdproxy/pdproxy/plugins/filter"
	"github.com/pdproxy/pdproxy/plugins/policy"
	"github.com/pdproxy/pdproxy/plugins/shared"
	"github.com/pdproxy/pdproxy/plugins/source"
)

// plugin is one loaded version of one [[plugin]], or of the built-in policies.
type plugin struct {
	spec     Spec
	digest   string
	failures *budget.Budget
	host     *budget.Host // of all versions of the plugin
	failed   atomic.Bool  // the latest new version could not replace this version

	version *policy.Version // of a policy
	world   *policy.World   // of a policy
	filter  *filter.Plugin  // of a filter
	calls   *filterCalls    // of a filter
}

// crashCPUShare is the share of one processor that calls which time out may use over
// Spec.CrashWindow. The third or a later such call above the share disables the plugin. With a
// tenth, a plugin that loops costs the machine little before the plugin is disabled, and a plugin
// that is slow now and then stays.
const crashCPUShare = 0.1

// slowCompile is the time after which a log line reports the compilation of a module.
// slowStart is the time after which a log line reports that the proxy waits for a plugin.
const slowCompile, slowStart = 200 * time.Millisecond, time.Second

// build compiles, starts and configures a version. The version does not serve yet. Its instances
// together may have the memory of one instance for each processor and of two more: as many
// instances can run at the same time, and two can be replaced.
func (s *Set) build(ctx context.Context, c *Config, spec Spec, content source.Content) (*plugin, error) {
	p := &plugin{spec: spec, digest: content.SHA256, failures: budget.New(spec.CrashBudget, spec.CrashWindow, crashCPUShare), host: s.hostOf(spec)}
	opts := host.LoadOptions{
		Guarded: !spec.Trusted, MemoryPages: spec.MemoryPages, TotalMemory: uint64(spec.MemoryPages) * host.PageSize * uint64(runtime.GOMAXPROCS(0)+2), Cache: s.cache,
		HostFunctions: spec.HostFunctions, CompileWorkers: runtime.GOMAXPROCS(0),
	}
	name := spec.Name
	if name == "" {
		name = "built-in policies"
	}
	began := time.Now()
	stop := func() {}
	defer func() { stop() }()
	opts.Compiling = func() {
		message, cache := "compiling, which takes a moment once; the result is kept", []any{"plugin", name, "cache", s.deps.CacheDir}
		if s.deps.CacheDir == "" {
			message, cache = "compiling, which takes a moment at each start", cache[:2]
		}
		stop = s.sayAfter(slowCompile, message, cache...)
	}
	compiled := func() {
		stop()
		about := []any{"plugin", name}
		if opts.Guarded {
			about = append(about, "limit", host.StartBudget)
		}
		stop = s.sayAfter(slowStart, "waiting for the plugin to start", about...)
	}
	var err error
	if spec.Filter {
		err = s.buildFilter(ctx, c, p, opts, content.Wasm, compiled)
	} else {
		err = s.buildPolicy(ctx, c, p, opts, content.Wasm, compiled)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: all of its instances have %v to start", err, host.StartBudget)
	}
	if err != nil {
		return nil, err
	}
	s.deps.Log.Debug("plugin loaded", "plugin", name, "sha256", p.digest, "took", time.Since(began))
	return p, nil
}

// sayAfter logs a message after wait, unless stop is called before. After stop has
// returned, sayAfter logs nothing.
func (s *Set) sayAfter(wait time.Duration, message string, attrs ...any) (stop func()) {
	said := make(chan struct{})
	timer := time.AfterFunc(wait, func() {
		defer close(said)
		s.deps.Log.Info(message, attrs...)
	})
	return func() {
		if !timer.Stop() {
			<-said
		}
	}
}

func (s *Set) buildPolicy(ctx context.Context, c *Config, p *plugin, load host.LoadOptions, wasm []byte, compiled func()) error {
	log := s.deps.Log
	if p.spec.Name != "" {
		log = log.With("plugin", p.spec.Name)
	}
	p.world = policy.NewWorld(policy.Setting{
		Name: p.spec.Name, Config: p.spec.Config, VMConfig: p.spec.VMConfig, VMID: p.spec.VMID, RootID: p.spec.RootID,
		Level: max(host.LowestLevel(log), host.LogInfo), Log: log, Store: &s.shared,
		Metrics: shared.NewMetricTable(s.metricsOf(p.spec.Name)), Conversations: s.deps.Conversations, Host: p.host,
	})
	limit := p.spec.Timeout
	if limit == 0 {
		limit = c.Budget
	}
	var err error
	p.version, err = policy.Load(ctx, policy.Options{
		Name: p.spec.Name, Wasm: wasm, Load: load, Budget: limit, Failures: p.failures, Seed: s.seed, Compiled: compiled,
		NewEnv: func() host.Env { return p.world },
		Meter:  func(label string, h abi.Hook) policy.Meter { return s.deps.Meter(label, h.String()) },
		Log:    log,
	})
	if err != nil {
		p.world.Close()
		return err
	}
	if err := p.version.Trial(); err != nil {
		attrs := []any{"error", err}
		if failure := new(host.Error); errors.As(err, &failure) {
			attrs = append(attrs, failure.Details(log)...)
		}
		log.Warn("the policy fails on made-up requests", attrs...)
	}
	return nil
}

// hostOf returns the Host of a plugin. A new version gets that of the serving
// version, so a reload does not give a new budget.
func (s *Set) hostOf(spec Spec) *budget.Host {
	if t := s.table.Load(); t != nil {
		if p := t.plugin(spec.Name); p != nil {
			return p.host
		}
	}
	return budget.NewHost(spec.HostMemory, s.deps.Meter(spec.Name, "host").Fail)
}

// metricsOf returns the metrics of a plugin, nil if none can be defined. A
// later version continues with the same values.
func (s *Set) metricsOf(name string) shared.Metrics {
	if s.deps.Metrics == nil {
		return nil
	}
	return s.deps.Metrics(name)
}

func (s *Set) buildFilter(ctx context.Context, c *Config, p *plugin, load host.LoadOptions, wasm []byte, compiled func()) error {
	p.calls = &filterCalls{}
	if s.deps.FilterMeter != nil {
		p.calls.next = s.deps.FilterMeter(p.spec.Name)
	}
	deps := filter.Deps{
		Shared: &s.shared, Budget: p.failures, Upstreams: c.Upstreams, Transport: s.deps.Transport,
		Metrics: s.metricsOf(p.spec.Name), Meter: p.calls, Node: s.deps.Node, Log: s.deps.Log,
		Conversations: s.deps.Conversations, Host: p.host,
	}
	p.filter = filter.New(filter.Spec{
		Name: p.spec.Name, Wasm: wasm, Load: load, Compiled: compiled, Config: p.spec.Config, VMConfig: p.spec.VMConfig,
		VMID: p.spec.VMID, RootID: p.spec.RootID, FailOpen: p.spec.FailOpen, HoldHeaders: p.spec.HoldHeaders,
		Upstreams: p.spec.Upstreams, Timeout: p.spec.Timeout,
	}, deps)
	return p.filter.Start(ctx)
}

// close ends the version after its running calls and streams have ended, or
// when ctx ends.
func (p *plugin) close(ctx context.Context) error {
	if p.filter != nil {
		return p.filter.Close(ctx)
	}
	err := p.version.Close(ctx)
	p.world.Close()
	return err
}

// find returns the policy of a hook by its name within the module. The name ""
// means the only one.
func (p *plugin) find(h abi.Hook, name string) (*policy.Policy, error) {
	if p.version == nil {
		return nil, fmt.Errorf("plugin %q is a filter", p.spec.Name)
	}
	if found, ok := p.version.Find(h, name); ok {
		return found, nil
	}
	var names []string
	for _, q := range p.version.Policies() {
		if q.Hook == h {
			names = append(names, q.Label)
		}
	}
	switch {
	case len(names) == 0:
		return nil, fmt.Errorf("plugin %q has no %s policy: it does not export %s", p.spec.Name, h, h.Export())
	case name == "" && len(names) == 1:
		_, only, _ := strings.Cut(names[0], "/")
		return p.find(h, only)
	case name == "":
		return nil, fmt.Errorf("plugin %q has several %s policies; name one of %s", p.spec.Name, h, strings.Join(names, ", "))
	}
	return nil, fmt.Errorf("plugin %q has no %s policy %q, but %s", p.spec.Name, h, name, strings.Join(names, ", "))
}

// state returns the state for operators.
func (p *plugin) state() string {
	switch {
	case p.failures.Parked():
		return "parked"
	case p.failed.Load():
		return "failed"
	}
	return "active"
}

// filterCalls counts the calls into a filter's guests, and passes them to next.
type filterCalls struct {
	calls policy.Calls
	next  filter.Meter // may be nil
}

// Observe implements filter.Meter.
func (f *filterCalls) Observe(c host.Callback, d time.Duration) {
	f.calls.Observe(d)
	if f.next != nil {
		f.next.Observe(c, d)
	}
}

// Fail implements filter.Meter.
func (f *filterCalls) Fail(c host.Callback, reason string) {
	f.calls.Fail()
	if f.next != nil {
		f.next.Fail(c, reason)
	}
}

// ErrUnknown is the error of a reload of an unknown policy or plugin.
var ErrUnknown = errors.New("there is no such policy or plugin")
