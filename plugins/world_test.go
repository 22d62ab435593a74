package plugins

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/plugins/policy"
	"github.com/pdproxy/pdproxy/plugins/policy/policytest"
	"github.com/pdproxy/pdproxy/plugins/source"
	"github.com/pdproxy/pdproxy/policies"
)

// bench is shared by all tests: the guest and a directory of compiled code.
var bench struct {
	dir, guest string
}

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "plugins")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		bench.guest = filepath.Join(dir, "guest.wasm")
		bench.dir = policytest.CacheDir(dir)
		if err := policytest.Build(bench.guest); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}())
}

// meters counts the values of the metrics.
type meters struct {
	mu    sync.Mutex
	calls map[string]int // by policy and hook
	fails map[string]int // by policy, hook and reason
}

type meter struct {
	m   *meters
	key string
}

func (m meter) Observe(time.Duration) {
	m.m.mu.Lock()
	defer m.m.mu.Unlock()
	m.m.calls[m.key]++
}

func (m meter) Fail(reason string) {
	m.m.mu.Lock()
	defer m.m.mu.Unlock()
	m.m.fails[m.key+" "+reason]++
}

func (m *meters) failed(key string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.fails[key]
}

// world is a Set under test.
type world struct {
	*Set
	*meters
	t       testing.TB
	config  Config
	changed int
}

// newWorld returns a Set with the compiled-in policies. The test must call Apply.
func newWorld(t testing.TB, specs ...Spec) *world {
	t.Helper()
	w := &world{t: t, meters: &meters{calls: make(map[string]int), fails: make(map[string]int)}}
	set, err := New(Deps{
		Builtin:  policies.Wasm,
		Meter:    func(p, hook string) policy.Meter { return meter{w.meters, p + " " + hook} },
		CacheDir: bench.dir,
		Changed:  func() { w.changed++ },
		Log:      slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	w.Set = set
	w.config = Config{
		Plugins: specs, Plan: []string{"auto"}, Place: "least_load", Mint: "snowflake", Retain: "likely", Evict: "lowest_youngest",
		Native: true, Budget: time.Minute,
		Natives: Natives{
			Plan: func(name string) (func(*abi.PlanFacts) abi.PlanDecision, bool) {
				f, ok := policies.Plan(name)
				return f, ok
			},
			Place: func(name string) (func(*abi.PlaceFacts) abi.PlaceDecision, bool) {
				f, ok := policies.Place(name)
				return f, ok
			},
			Mint: func(name string) (func(*abi.MintFacts) uint64, bool) {
				f, ok := policies.Mint(name)
				return f, ok
			},
			Evict: func(name string) (func(*abi.EvictFacts) int32, bool) {
				f, ok := policies.Evict(name)
				return f, ok
			},
			Retain: func(name string) (func(*abi.RetainFacts) abi.RetainDecision, bool) {
				f, ok := policies.Retain(name)
				return f, ok
			},
			Needs: policies.Needs,
		},
	}
	t.Cleanup(func() {
		if err := set.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return w
}

func (w *world) apply() {
	w.t.Helper()
	if err := w.Apply(w.t.Context(), w.config); err != nil {
		w.t.Fatal(err)
	}
}

// guest is a plugin with a copy of the test guest.
func guest(t testing.TB, config string) Spec {
	t.Helper()
	wasm, err := os.ReadFile(bench.guest)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "guest.wasm")
	if err := os.WriteFile(path, wasm, 0o600); err != nil {
		t.Fatal(err)
	}
	return Spec{
		Name: "p", Source: source.Source{Location: path}, MemoryPages: 1024, HostFunctions: []string{"*"},
		Config: config, CrashBudget: 20, CrashWindow: time.Hour,
	}
}

// row is the row of one policy.
func (w *world) row(name, phase string) Row {
	w.t.Helper()
	for _, r := range w.Rows() {
		if r.Name == name && r.Phase == phase {
			return r
		}
	}
	w.t.Fatalf("no row %s %s in %+v", name, phase, w.Rows())
	return Row{}
}

// place requests a decision. by and reason are those of the guest.
func (w *world) place(do string) (d abi.PlaceDecision, by string, ok bool) {
	return w.Place(w.t.Context(), policytest.Pair(do))
}
