// Package plugins manages the plugins of a configuration and passes the proxy's calls to
// them. Set loads, starts, configures and tests each module while the old version serves,
// and replaces the old version between two decisions. A replaced version finishes its
// work and is freed. Set has the methods of the coordinator's Decider, of the attempt's
// Hooks and of the proxy's filters, and imports neither package.
//
// The packages below it: source (where modules come from), budget (limits of
// failures and resources), shared (data that guests share), policy (one version
// of a policy module), filter (one version of a filter, and the chain of
// filters). For authors there are build (from source to module) and trial (a
// module on recorded inputs).
//
// The decisions behind this package are in docs/design/plugins.md.
package plugins

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/filter"
	"github.com/pdproxy/pdproxy/plugins/shared"
	"github.com/pdproxy/pdproxy/plugins/source"
)

// The times in which a replaced version must end: for a policy longer than any
// time limit of a call, for a filter as long as an answer may stream.
const (
	policyDrain = time.Minute
	filterDrain = time.Hour
)

// Set holds the plugins and policies that serve. Its methods are safe for
// concurrent use. Decisions never wait for a reload.
type Set struct {
	deps   Deps
	cache  *host.Cache
	shared shared.Store
	chain  filter.Chain
	seed   uint32
	table  atomic.Pointer[table]

	loading sync.Mutex // Apply and Reload hold it; locked before mu
	mu      sync.Mutex // each change holds it
	natives map[nativeKey]*compiledIn
	watches map[string]*source.Watch // by the plugin's name
	closed  bool

	draining     sync.WaitGroup // replaced versions
	drains       context.Context
	cancelDrains context.CancelFunc // ends the wait for replaced versions
}

// New returns a Set in which nothing is loaded. Call Apply before any other
// method, and Close at the end.
func New(deps Deps) (*Set, error) {
	if deps.CacheDir != "" {
		prune(deps.CacheDir, maxCache)
	}
	cache, err := host.NewCache(deps.CacheDir)
	if err != nil {
		// Without the cache each start has to compile again, which only takes
		// time.
		deps.Log.Warn("the compile cache cannot be used: each start compiles the plugins again", "error", err)
		if cache, err = host.NewCache(""); err != nil {
			return nil, err
		}
		deps.CacheDir = ""
	}
	s := &Set{
		deps: deps, cache: cache, seed: rand.Uint32(),
		natives: make(map[nativeKey]*compiledIn), watches: make(map[string]*source.Watch),
	}
	s.drains, s.cancelDrains = context.WithCancel(context.Background())
	return s, nil
}

// Apply makes the Set serve c. Versions with the same module and settings continue, unless they are
// parked. Apply builds the other versions first. A version that differs only in its module takes a
// share of the decisions first, if the plugin has one (Spec.Canary). When a version cannot be used, or c names a policy
// that does not exist, nothing changes and Apply returns Errors: one for every plugin that cannot
// be used, or one for the policy.
func (s *Set) Apply(ctx context.Context, c Config) error {
	s.loading.Lock()
	defer s.loading.Unlock()
	contents, failures := s.readAll(ctx, c.Plugins)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errors.New("apply plugins: closed")
	}
	old := s.table.Load()
	if old == nil {
		old = &table{config: &Config{}}
	}
	next := &table{config: &c}
	var fresh []*plugin
	err := func() error {
		var wrong Errors
		for i, spec := range c.Plugins {
			content, err := contents[i], failures[i]
			switch {
			case errors.Is(err, source.ErrDigest):
				wrong = append(wrong, pluginError(i, ".sha256", spec.Name, err))
				continue
			case errors.Is(err, source.ErrSignature):
				wrong = append(wrong, pluginError(i, ".public_key", spec.Name, err))
				continue
			case err != nil:
				wrong = append(wrong, pluginError(i, ".path", spec.Name, err))
				continue
			}
			p := old.same(&c, spec)
			running := old.trialOf(p, content.SHA256)
			switch {
			case p != nil && p.digest == content.SHA256:
				p.failed.Store(false) // the file contains the serving version again
			case running != nil:
				next.canaries = append(next.canaries, *running)
			default:
				v, err := s.build(ctx, &c, spec, content)
				if err == nil {
					fresh = append(fresh, v)
					if p == nil || !p.wantsProof() {
						p = v
					} else {
						err = next.prove(p, v)
					}
				}
				if err != nil {
					wrong = append(wrong, pluginError(i, "", spec.Name, err))
					continue
				}
			}
			next.plugins = append(next.plugins, p)
		}
		if len(wrong) > 0 {
			return wrong
		}
		if !c.Native && c.needsBuiltin() {
			if next.builtin = old.builtin; next.builtin == nil || next.builtin.failures.Parked() || old.config.Budget != c.Budget || old.config.Params != c.Params {
				p, err := s.buildBuiltin(ctx, &c)
				if err != nil {
					return Errors{{Key: "policy", Err: err}}
				}
				next.builtin, fresh = p, append(fresh, p)
			}
		}
		return s.resolve(next)
	}()
	if err != nil {
		for _, p := range fresh {
			err = errors.Join(err, p.close(ctx))
		}
		return err
	}
	for _, c := range next.canaries {
		c.old.failed.Store(false)
		s.watches[c.old.spec.Name] = source.NewWatch(c.old.spec.Source, c.fresh.digest) // the same bytes are not tried again
	}
	s.swap(next)
	for _, c := range next.canaries {
		if slices.Contains(fresh, c.fresh) {
			s.sayCanary(c)
		}
	}
	return nil
}

// same returns the version with these settings that can continue with config c; nil if
// there is none.
func (t *table) same(c *Config, spec Spec) *plugin {
	p := t.plugin(spec.Name)
	switch {
	case p == nil, p.failures.Parked(), !reflect.DeepEqual(p.spec, spec):
		return nil
	case p.filter != nil && !reflect.DeepEqual(t.config.Upstreams, c.Upstreams):
		return nil
	case p.version != nil && spec.Timeout == 0 && t.config.Budget != c.Budget:
		return nil
	}
	return p
}

// plugin returns the plugin of that name, nil if there is none.
func (t *table) plugin(name string) *plugin {
	for _, p := range t.plugins {
		if p.spec.Name == name {
			return p
		}
	}
	return nil
}

// builtinBudget is the number of failures of the built-in policies that are
// allowed. It is small, because an error of our own code is likely to repeat.
const builtinBudget, builtinWindow = 20, 10 * time.Second

// builtinPages is the memory of an instance of the built-in policies, in pages
// of 64 KiB.
const builtinPages = 1024

// buildBuiltin loads the built-in policies.
func (s *Set) buildBuiltin(ctx context.Context, c *Config) (*plugin, error) {
	content := source.Content{Wasm: s.deps.Builtin()}
	digest := sha256.Sum256(content.Wasm)
	content.SHA256 = hex.EncodeToString(digest[:])
	p, err := s.build(ctx, c, Spec{
		Trusted: true, HostFunctions: []string{"*"}, MemoryPages: builtinPages, CrashBudget: builtinBudget, CrashWindow: builtinWindow, Config: c.Params,
	}, content)
	if err != nil {
		return nil, fmt.Errorf("load built-in policies: %w", err)
	}
	return p, nil
}

// swap makes next serve and ends the versions that only the old table had. The
// caller holds s.mu.
func (s *Set) swap(next *table) {
	old := s.table.Swap(next)
	var filters []*filter.Plugin
	keep := make(map[*plugin]bool)
	for _, p := range next.all() {
		keep[p] = true
	}
	watches := make(map[string]*source.Watch)
	for _, p := range next.plugins {
		p.host.SetLimit(p.spec.HostMemory)
		if p.filter != nil {
			filters = append(filters, p.filter)
		}
		if w := s.watches[p.spec.Name]; w != nil && old != nil && old.plugin(p.spec.Name) == p {
			watches[p.spec.Name] = w
		} else {
			watches[p.spec.Name] = source.NewWatch(p.spec.Source, p.digest)
		}
	}
	s.watches = watches
	s.chain.Set(filters, next.config.Limits)
	if old != nil {
		for _, p := range old.all() {
			if !keep[p] {
				s.drain(p)
			}
		}
	}
	if s.deps.Changed != nil {
		s.deps.Changed()
	}
}

// readAll reads the modules of plugins, all at the same time: a registry that does not answer
// delays a reload once. The result has a content or an error for each plugin. The caller holds
// s.loading, but not s.mu: a trial ends, and Close returns, while a registry is slow.
func (s *Set) readAll(ctx context.Context, specs []Spec) ([]source.Content, []error) {
	contents, failures := make([]source.Content, len(specs)), make([]error, len(specs))
	var reads sync.WaitGroup
	for i, spec := range specs {
		reads.Go(func() { contents[i], failures[i] = spec.Source.Read(ctx, s.deps.CacheDir) })
	}
	reads.Wait()
	return contents, failures
}

// drain ends a version in the background after its last work.
func (s *Set) drain(p *plugin) {
	limit := policyDrain
	if p.filter != nil {
		limit = filterDrain
	}
	s.draining.Go(func() {
		ctx, cancel := context.WithTimeout(s.drains, limit)
		defer cancel()
		if err := p.close(ctx); err != nil {
			s.deps.Log.Warn("a replaced plugin version did not stop cleanly", "plugin", p.spec.Name, "sha256", p.digest, "error", err)
		}
	})
}

// Shrink ends the free instances of policy modules that were started during a load. Decisions
// continue.
func (s *Set) Shrink() {
	for _, p := range s.table.Load().all() {
		if p.version != nil {
			p.version.Shrink()
		}
	}
}

// Reload loads a plugin again, by its name or that of one of its policies, or
// the built-in policies, by the name of a used one. It returns when the new
// version serves. On an error the old version continues.
func (s *Set) Reload(ctx context.Context, name string) error {
	s.loading.Lock()
	defer s.loading.Unlock()
	plugin, _, _ := strings.Cut(name, "/")
	var specs []Spec
	if t := s.table.Load(); t != nil {
		if p := t.plugin(plugin); p != nil {
			specs = []Spec{p.spec}
		}
	}
	contents, failures := s.readAll(ctx, specs)
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.table.Load()
	if s.closed || t == nil {
		return ErrUnknown
	}
	if len(specs) > 0 {
		return s.reload(ctx, t, t.plugin(plugin), contents[0], failures[0])
	}
	next := *t
	switch isNative, used := t.builtinNamed(name); {
	case !used:
		return fmt.Errorf("reload %q: %w", name, ErrUnknown)
	case isNative:
		return fmt.Errorf("reload %q: it is compiled in and has one version only", name)
	}
	var err error
	if next.builtin, err = s.buildBuiltin(ctx, t.config); err != nil {
		return err
	}
	if err := s.resolve(&next); err != nil {
		return errors.Join(err, next.builtin.close(ctx))
	}
	s.swap(&next)
	return nil
}

// refuse records that the new version of p cannot be used.
func (s *Set) refuse(p *plugin, err error) error {
	p.failed.Store(true)
	s.countRefusal(p)
	s.deps.Log.Error("plugin not reloaded; the old version stays", "plugin", p.spec.Name, "error", err)
	return fmt.Errorf("reload %s: %w", p.spec.Name, err)
}

// countRefusal counts a version that could not be used.
func (s *Set) countRefusal(p *plugin) {
	switch {
	case p.version != nil:
		s.deps.Meter(p.spec.Name, "load").Fail("failed")
	case p.calls.next != nil:
		p.calls.next.Fail(host.OnConfigure, "start")
	}
}

// Wrap returns h with the filters around it. Each request passes the filters
// that are loaded when it arrives.
func (s *Set) Wrap(h http.Handler) http.Handler { return s.chain.Wrap(h) }

// Filters is whether filters are loaded now. Without filters a request may skip the handler of Wrap.
func (s *Set) Filters() *atomic.Bool { return &s.chain.Active }

// Close ends all versions. ctx bounds how long streams may still run. Later
// calls get no decision.
func (s *Set) Close(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	defer context.AfterFunc(ctx, s.cancelDrains)()
	defer s.cancelDrains()
	var errs []error
	if t := s.table.Load(); t != nil {
		for _, p := range t.all() {
			errs = append(errs, p.close(ctx))
		}
	}
	s.draining.Wait()
	if t, ok := s.deps.Transport.(interface{ CloseIdleConnections() }); ok {
		t.CloseIdleConnections()
	}
	return errors.Join(append(errs, s.cache.Close(ctx))...)
}
