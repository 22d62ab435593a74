package policy

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/budget"
	"github.com/pdproxy/pdproxy/plugins/policy/policytest"
)

// guests is the build of testdata/guest, made once for all tests.
var guests struct {
	once  sync.Once
	wasm  []byte
	cache *host.Cache
	err   error
}

func buildGuests() {
	dir, err := os.MkdirTemp("", "guests")
	if err != nil {
		guests.err = err
		return
	}
	defer os.RemoveAll(dir)
	out := filepath.Join(dir, "guest.wasm")
	if guests.err = policytest.Build(out); guests.err != nil {
		return
	}
	if guests.wasm, guests.err = os.ReadFile(out); guests.err != nil {
		return
	}
	guests.cache, guests.err = host.NewCache(policytest.CacheDir(dir))
}

// guest returns the test guest.
func guest(t testing.TB) []byte {
	t.Helper()
	guests.once.Do(buildGuests)
	if guests.err != nil {
		t.Fatal(guests.err)
	}
	return guests.wasm
}

// world is the Env of test VMs. Its missing parts are nil.
type world struct {
	host.Env
	config string
	level  func() // LogLevel calls it; nil: nothing
}

func (w *world) Log(host.LogLevel, string) {}
func (w *world) VMConfig() []byte          { return nil }
func (w *world) PluginConfig() []byte      { return []byte(w.config) }

func (w *world) LogLevel() host.LogLevel {
	if w.level != nil {
		w.level()
	}
	return host.LogInfo
}

// meter records its calls.
type meter struct {
	mu    sync.Mutex
	calls int
	fails map[string]int
}

func (m *meter) Observe(time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls++
}

func (m *meter) Fail(reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fails[reason]++
}

func (m *meter) failed(reason string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.fails[reason]
}

// loading are the options with which tests load the guest; change them before
// load.
type loading struct {
	Options
	config string
	meter  *meter
}

func newLoading() *loading {
	m := &meter{fails: make(map[string]int)}
	l := &loading{meter: m, Options: Options{
		Name:     "p",
		Budget:   time.Minute, // only tests of late calls measure time
		VMs:      2,
		Failures: budget.New(1000, time.Hour, 0),
		Meter:    func(string, abi.Hook) Meter { return m },
		Log:      slog.New(slog.DiscardHandler),
	}}
	l.NewEnv = func() host.Env { return &world{config: l.config} }
	return l
}

func (l *loading) try(t testing.TB) (*Version, error) {
	t.Helper()
	l.Wasm = guest(t)
	l.Load.Cache, l.Load.CompileWorkers = guests.cache, 2
	v, err := Load(t.Context(), l.Options)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() {
		if err := v.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return v, nil
}

func (l *loading) load(t testing.TB) *Version {
	t.Helper()
	v, err := l.try(t)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// hook returns the policy of a hook of an unnamed guest.
func hook(t testing.TB, v *Version, h abi.Hook) *Policy {
	t.Helper()
	p, ok := v.Find(h, "")
	if !ok {
		t.Fatalf("no %s policy", h)
	}
	return p
}
