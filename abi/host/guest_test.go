package host

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// builtGuest builds testdata/guest once per test binary.
var builtGuest = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "guest")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	out := filepath.Join(dir, "guest.wasm")
	build := exec.Command("go", "build", "-trimpath", "-buildmode=c-shared", "-o", out, "./testdata/guest")
	build.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "GOFLAGS=")
	if text, err := build.CombinedOutput(); err != nil {
		return nil, errors.New(string(text))
	}
	return os.ReadFile(out)
})

// guestCache saves the tests from compiling the guest each time.
var guestCache = sync.OnceValues(func() (*Cache, error) { return NewCache("") })

func goGuest(tb testing.TB) []byte {
	tb.Helper()
	wasm, err := builtGuest()
	if err != nil {
		tb.Fatal(err)
	}
	return wasm
}

// goModule is the Go guest, guarded, with 16 MiB. It is closed after the test;
// its code stays in the cache.
func goModule(t *testing.T) *Module {
	t.Helper()
	cache, err := guestCache()
	if err != nil {
		t.Fatal(err)
	}
	// One module that is never closed keeps the code in the cache.
	keepGuest.Do(func() {
		_, err = Load(context.Background(), goGuest(t), LoadOptions{Guarded: true, MemoryPages: 256, Cache: cache, CompileWorkers: 2})
	})
	if err != nil {
		t.Fatal(err)
	}
	return load(t, goGuest(t), LoadOptions{Guarded: true, MemoryPages: 256, Cache: cache})
}

var keepGuest sync.Once

// configured returns a VM of the Go guest with root context 1 and a configuration.
func configured(t *testing.T, w *world, config string) *VM {
	t.Helper()
	w.vmConfig, w.config = "settings", config
	vm := start(t, goModule(t), w)
	if ok, err := vm.VMStart(t.Context(), 1); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if ok, err := vm.Configure(t.Context(), 1); ok != (config != "refuse") || err != nil {
		t.Fatal(ok, err)
	}
	return vm
}

func TestGoGuest(t *testing.T) {
	ctx := t.Context()
	w := newWorld()
	vm := configured(t, w, "")
	if err := vm.ContextCreate(ctx, 2, 1); err != nil {
		t.Fatal(err)
	}
	if want := []string{"INFO init", "INFO create 1 0", "INFO vm settings", "INFO create 2 1"}; !slices.Equal(w.lines, want) {
		t.Errorf("logged %q", w.lines)
	}
	s := w.newStream(2)
	s.maps[0].pairs = Pairs{{":path", "/v1/models"}}
	s.bodies[0] = []byte(strings.Repeat("abc", 100_000))
	if a, err := vm.RequestHeaders(ctx, 2, 1, false); a != Continue || err != nil {
		t.Fatal(a, err)
	}
	if want := (Pairs{{":path", "/v1/models"}, {"x-path", "/v1/models"}}); !slices.Equal(s.maps[0].pairs, want) {
		t.Errorf("headers %v", s.maps[0].pairs)
	}
	if a, err := vm.RequestBody(ctx, 2, len(s.bodies[0]), true); a != Continue || err != nil {
		t.Fatal(a, err)
	}
	if string(s.bodies[0]) != strings.Repeat("ABC", 100_000) {
		t.Error("the body was not rewritten")
	}
	if n, ok, err := vm.Value(ctx, "pdproxy_v1_needs"); n != 5 || !ok || err != nil {
		t.Errorf("needs: %d, %v, %v", n, ok, err)
	}
	if text, _, err := vm.Text(ctx, "pdproxy_v1_policies"); text != "place least\nmint one" || err != nil {
		t.Errorf("policies: %q, %v", text, err)
	}
}

func TestGoGuestRefuses(t *testing.T) { configured(t, newWorld(), "refuse") }

func TestGoGuestWorks(t *testing.T) {
	for config, want := range map[string]string{
		"garbage":     "INFO collected",
		"sleep":       "INFO slept true",
		"goroutines":  "INFO sum 45",
		"environment": "INFO 0 0 true",
	} {
		t.Run(config, func(t *testing.T) {
			w := newWorld()
			vm := configured(t, w, config)
			if err := vm.Tick(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			if last := w.lines[len(w.lines)-1]; last != want {
				t.Errorf("logged %q, want %q", last, want)
			}
		})
	}
}

func TestGoGuestFails(t *testing.T) {
	tests := []struct {
		config  string
		failure Failure
		logged  string
	}{
		{"panic", Trap, "ERROR panic: deliberate"},
		{"exit", Exit, ""},
		{"loop", Timeout, ""},
		{"bomb", OutOfMemory, "ERROR fatal error: out of memory"},
	}
	for _, tt := range tests {
		t.Run(tt.config, func(t *testing.T) {
			w := newWorld()
			vm := configured(t, w, tt.config)
			limit := time.Minute
			if tt.failure == Timeout {
				limit = 50 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			err := vm.Tick(ctx, 1)
			failure := (*Error)(nil)
			if !errors.As(err, &failure) || failure.Failure != tt.failure {
				t.Fatalf("got %v, want %v", err, tt.failure)
			}
			if strings.Contains(err.Error()+failure.Stack, "deliberate") {
				t.Errorf("the guest's words are in the error: %v", err)
			}
			if tt.logged != "" && !slices.ContainsFunc(w.lines, func(l string) bool { return strings.HasPrefix(l, tt.logged) }) {
				t.Errorf("logged %q, want %q", w.lines, tt.logged)
			}
			if err := vm.Tick(t.Context(), 1); !errors.Is(err, ErrPoisoned) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// Each VM has its own memory, and its own real clocks and randomness.
func TestManyVMs(t *testing.T) {
	m := goModule(t)
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			w := newWorld()
			vm, err := m.NewVM(context.Background(), w)
			if err != nil {
				t.Error(err)
				return
			}
			defer vm.Close(context.Background())
			place, _ := vm.Hook("pdproxy_v1_on_place")
			rows := 8 + i
			run := decide(t, vm, place, rows)
			for range 100 {
				if got := run(); (got+7)*31%int64(rows) != 0 {
					t.Errorf("row %d of %d was chosen", got, rows)
					return
				}
			}
		})
	}
	group.Wait()
}
