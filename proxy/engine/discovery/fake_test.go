package discovery

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// fakeRegistry stores the list of each source. It refuses the names in refuse.
type fakeRegistry struct {
	mu      sync.Mutex
	lists   map[string][]config.Engine
	applied int
	refuse  map[string]string
}

func newFakeRegistry() *fakeRegistry {
	return &fakeRegistry{lists: map[string][]config.Engine{}, refuse: map[string]string{}}
}

func (r *fakeRegistry) Expect(time.Duration) func() { return func() {} }

func (r *fakeRegistry) Apply(source string, specs []config.Engine, drainFor time.Duration) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, s := range specs {
		if cause := r.refuse[s.Name]; cause != "" && cause != s.Model {
			errs = append(errs, &engine.SpecError{Name: s.Name, Cause: errors.New(cause)})
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if drainFor != time.Minute {
		return fmt.Errorf("drains for %v", drainFor)
	}
	r.applied++
	r.lists[source] = slices.Clone(specs)
	return nil
}

// names lists the engines of a source.
func (r *fakeRegistry) names(source string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	names := []string{}
	for _, e := range r.lists[source] {
		names = append(names, e.Name)
	}
	return names
}

// spec returns an engine of a source.
func (r *fakeRegistry) spec(t *testing.T, source, name string) config.Engine {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.lists[source] {
		if e.Name == name {
			return e
		}
	}
	t.Fatalf("no engine %s of %s", name, source)
	return config.Engine{}
}

// logs collects log lines.
type logs struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// take returns the log lines since the last call.
func (l *logs) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.text.Reset()
	return l.text.String()
}

func (l *logs) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// options returns the options of a test.
func options(r Registry, l *logs) Options {
	return Options{Registry: r, Log: l.logger(), DrainFor: func() time.Duration { return time.Minute }}
}

func spec(name, url string) config.Engine {
	e := config.DefaultEngine()
	e.Name, e.URL, e.Role = name, url, config.RoleBoth
	return e
}
