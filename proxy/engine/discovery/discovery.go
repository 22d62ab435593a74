// Package discovery finds engines beyond those of the configuration: in a file, in DNS,
// in etcd, behind Kubernetes Services. Each source passes complete lists to the
// registry. The registry keeps unchanged engines, drains missing ones, and probes new
// ones.
//
// One rule holds for all sources: a failure changes nothing. An unreadable file, a name
// server that does not answer or an unreachable etcd leave the engines as they were.
// Only a valid answer without an engine removes it. A bad entry of a list is skipped
// and logged, and does not affect the others.
//
// The decisions behind this package are in docs/design/engines.md.
package discovery

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/lograte"
)

// Source finds engines in one place.
type Source interface {
	// Name is the source of its engines in the registry.
	Name() string
	// Run searches until ctx ends. It calls found from its own goroutine with the
	// complete list whenever the list may have changed. Before the first call no list is
	// known.
	Run(ctx context.Context, found func([]config.Engine))
}

// Registry receives the lists; *engine.Registry implements it.
type Registry interface {
	Apply(source string, specs []config.Engine, drainFor time.Duration) error
	Expect(limit time.Duration) (arrived func())
}

var _ Registry = (*engine.Registry)(nil)

// Options configures a Manager.
type Options struct {
	// Registry gets the lists. Nil: the manager only checks its configuration and never runs.
	Registry Registry
	// DrainFor returns how long an engine that disappeared from its source may take to
	// finish its requests.
	DrainFor func() time.Duration
	// More holds sources in addition to those that New builds from the configuration.
	More []Source
	// Log may be nil.
	Log *slog.Logger
}

// retryRefused is the pause before a rejected engine is offered to the registry again.
// Its name may be free by then.
const retryRefused = 2 * time.Second

// Manager runs the sources of a configuration.
type Manager struct {
	o       Options
	allow   allowList
	sources []Source
	arrived []func() // to call when the first list of the source has been applied
}

// New returns a manager of the sources that cfg enables. cfg must have been validated.
// New opens only files with keys, and starts only the time for the first lists.
func New(cfg config.Discovery, o Options) (*Manager, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	m := &Manager{o: o, allow: newAllowList(cfg.Allow), sources: o.More}
	if cfg.File.Path != "" {
		m.sources = append(m.sources, &fileSource{path: cfg.File.Path, log: o.Log})
	}
	if len(cfg.DNS.Engines) > 0 {
		m.sources = append(m.sources, newDNS(cfg.DNS, o.Log))
	}
	if len(cfg.SGLang.Engines) > 0 {
		m.sources = append(m.sources, newSGLang(cfg.SGLang, o.Log))
	}
	if len(cfg.Etcd.Endpoints) > 0 {
		s, err := newRecords(cfg.Etcd, o.Log)
		if err != nil {
			return nil, err
		}
		m.sources = append(m.sources, s)
	}
	if len(cfg.Kubernetes.Engines)+len(cfg.Kubernetes.Pools) > 0 {
		s, err := newKubernetes(cfg.Kubernetes, o.Log)
		if err != nil {
			return nil, err
		}
		m.sources = append(m.sources, s)
	}
	if strings.HasPrefix(cfg.TRTLLM.ClusterURI, "etcd://") { // otherwise the proxy serves the store: ListenStorage
		m.sources = append(m.sources, newCluster(cfg.TRTLLM, o.Log))
	}
	if cfg.TRTLLM.MetadataURI != "" {
		m.sources = append(m.sources, newMetadata(cfg.TRTLLM, o.Log))
	}
	if o.Registry != nil {
		for range m.sources {
			m.arrived = append(m.arrived, o.Registry.Expect(engine.FirstList))
		}
	}
	return m, nil
}

// Run searches for engines until ctx ends. When it returns, no source is running.
func (m *Manager) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for n, s := range m.sources {
		wg.Go(func() { m.follow(ctx, s, m.arrived[n]) })
	}
}

// follow passes the lists of one source to the registry, and calls arrived after each of them.
func (m *Manager) follow(ctx context.Context, s Source, arrived func()) {
	var wg sync.WaitGroup
	defer wg.Wait()
	lists := make(chan []config.Engine)
	wg.Go(func() {
		s.Run(ctx, func(list []config.Engine) {
			select {
			case lists <- list:
			case <-ctx.Done():
			}
		})
	})
	t := &taker{m: m, source: s.Name(), taken: map[string]config.Engine{}, logged: map[string]string{}, refusals: newRefusals()}
	retry := time.NewTicker(retryRefused)
	defer retry.Stop()
	var latest []config.Engine
	for refused := false; ; {
		select {
		case <-ctx.Done():
			return
		case latest = <-lists:
			refused = t.take(latest)
			arrived()
		case <-retry.C:
			if refused {
				refused = t.take(latest)
			}
		}
	}
}

// taker passes the lists of one source to the registry. One goroutine owns it.
type taker struct {
	m      *Manager
	source string
	taken  map[string]config.Engine // the engines that the registry accepted, by name
	logged map[string]string        // why engines are left out, as logged

	refusals *lograte.Limiter[string] // decides which reasons are logged, by the name
}

// take applies the list to the registry and reports whether the registry rejected any
// engine. Of a rejected engine the accepted earlier version stays.
func (t *taker) take(list []config.Engine) (refused bool) {
	reasons := map[string]string{}
	var offer []config.Engine
	for _, e := range list {
		if err := t.m.allow.check(e); err != nil {
			reasons[e.Name] = err.Error()
			continue
		}
		offer = append(offer, e)
	}
	for {
		err := t.m.o.Registry.Apply(t.source, offer, t.m.o.DrainFor())
		if err == nil {
			break
		}
		refused = true
		specs := specErrors(err)
		if len(specs) == 0 {
			t.m.o.Log.Error("found engines were refused; nothing changes", "source", t.source, "error", err)
			return true
		}
		for _, s := range specs {
			reasons[s.Name] = s.Cause.Error()
			offer = t.withdraw(offer, s.Name)
		}
	}
	clear(t.taken)
	for _, e := range offer {
		t.taken[e.Name] = e
	}
	t.logRefused(reasons)
	return refused
}

// withdraw replaces an engine by its accepted earlier version. If that is the same, or
// there is none, it removes the engine.
func (t *taker) withdraw(offer []config.Engine, name string) []config.Engine {
	n := slices.IndexFunc(offer, func(e config.Engine) bool { return e.Name == name })
	if n < 0 {
		return offer
	}
	if before, ok := t.taken[name]; ok && before != offer[n] {
		offer[n] = before
		return offer
	}
	return slices.Delete(offer, n, n+1)
}

// logRefused logs why engines are left out, once for each reason.
func (t *taker) logRefused(reasons map[string]string) {
	for name, reason := range reasons {
		if t.logged[name] != reason && t.refusals.Allow(name) {
			t.m.o.Log.Error("found engine refused", "source", t.source, "engine", excerpt(name), "error", excerpt(reason))
		}
	}
	t.logged = reasons
}

// specErrors returns the errors of single engines in an error of Registry.Apply.
func specErrors(err error) (list []*engine.SpecError) {
	if several, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range several.Unwrap() {
			list = append(list, specErrors(e)...)
		}
		return list
	}
	if one := (*engine.SpecError)(nil); errors.As(err, &one) {
		list = append(list, one)
	}
	return list
}

// trouble logs a failure of a source once, until it changes or ends.
type trouble struct {
	log    *slog.Logger
	source string
	last   string
}

// note records the result of an attempt; nil means success.
func (t *trouble) note(err error) {
	switch {
	case err == nil && t.last != "":
		t.last = ""
		t.log.Info("discovery of engines works again", "source", t.source)
	case err != nil && err.Error() != t.last:
		t.last = err.Error()
		t.log.Warn("discovery of engines failed; the known engines stay", "source", t.source, "error", err)
	}
}

// pause waits for d. It returns false if ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
