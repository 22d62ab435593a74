package policies

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/proxy/privatedir/isolated"
)

// scratchSize is the size of the scratch buffer that the host requests.
const scratchSize = 64 << 10

// world is a host.Env with a log, a configuration, and two foreign functions. A
// guest that calls anything else makes the test panic.
type world struct {
	host.Env
	log    func(string)
	config string
	notes  []string
}

func (w *world) Log(_ host.LogLevel, message string) { w.log(message) }
func (w *world) LogLevel() host.LogLevel             { return host.LogTrace }
func (w *world) VMConfig() []byte                    { return nil }
func (w *world) PluginConfig() []byte                { return []byte(w.config) }

func (w *world) Foreign(_ uint32, name string, args []byte) ([]byte, host.Status) {
	switch name {
	case abi.ForeignNote:
		w.notes = append(w.notes, string(args))
		return nil, host.OK
	case "test.echo":
		return args, host.OK
	}
	return nil, host.NotFound
}

// guest is one VM of a module and its hooks.
type guest struct {
	t     testing.TB
	world *world
	vm    *host.VM
	hooks [abi.LastHook + 1]*host.Hook
	needs abi.Needs
	names map[abi.Hook][]string
}

// run starts a module without a configuration. The module must not log anything.
func run(t testing.TB, wasm []byte) *guest {
	t.Helper()
	return start(t, wasm, &world{log: func(m string) { t.Errorf("log line of the guest: %s", m) }})
}

// runGuarded is run of a module that is not trusted.
func runGuarded(t testing.TB, wasm []byte) *guest {
	t.Helper()
	w := &world{log: func(m string) { t.Errorf("log line of the guest: %s", m) }}
	return startWith(t, wasm, w, host.LoadOptions{Guarded: true})
}

// start starts a module in a world and configures it.
func start(t testing.TB, wasm []byte, w *world) *guest {
	t.Helper()
	return startWith(t, wasm, w, host.LoadOptions{})
}

// startWith is start with other options.
func startWith(t testing.TB, wasm []byte, w *world, opts host.LoadOptions) *guest {
	t.Helper()
	return startIn(t, context.Background(), wasm, w, opts)
}

// startIn is startWith in a context, which may have listeners of the Wasm engine.
func startIn(t testing.TB, ctx context.Context, wasm []byte, w *world, opts host.LoadOptions) *guest {
	t.Helper()
	cache, err := host.NewCache(cacheRoot)
	if err != nil {
		t.Fatal(err)
	}
	opts.Cache, opts.CompileWorkers = cache, 2
	module, err := host.Load(ctx, wasm, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { module.Close(ctx); cache.Close(ctx) })
	vm, err := module.NewVM(ctx, w)
	if err != nil {
		t.Fatal(err)
	}
	g := &guest{t: t, world: w, vm: vm, names: map[abi.Hook][]string{}}
	if module.Info().ABIVersion != "" {
		if err := vm.ContextCreate(ctx, 1, 0); err != nil {
			t.Fatal(err)
		}
		if ok, err := vm.VMStart(ctx, 1); !ok || err != nil {
			t.Fatalf("start: %v, %v", ok, err)
		}
		if ok, err := vm.Configure(ctx, 1); !ok || err != nil {
			t.Fatalf("configure: %v, %v", ok, err)
		}
	}
	for h := abi.HookPlan; h <= abi.LastHook; h++ {
		g.hooks[h], _ = vm.Hook(h.Export())
	}
	needs, _, err := vm.Value(ctx, abi.ExportNeeds)
	if err != nil {
		t.Fatal(err)
	}
	g.needs = abi.Needs(needs)
	text, _, err := vm.Text(ctx, abi.ExportPolicies)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(text) {
		hook, name, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		h, known := abi.ParseHook(hook)
		if !ok || !known {
			t.Fatalf("list of policies has the line %q", line)
		}
		g.names[h] = append(g.names[h], name)
	}
	return g
}

// cacheRoot keeps compiled guests for the other tests of this run.
var cacheRoot string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "policies")
	if err != nil {
		panic(err)
	}
	cacheRoot = dir
	code := isolated.Run(m)
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// scratch returns the view that the next frame is written to.
func (g *guest) scratch() (view []byte, ptr uint32) {
	view, ptr, err := g.vm.Scratch(context.Background(), scratchSize)
	if err != nil {
		g.t.Fatal(err)
	}
	return view[:0], ptr
}

// call calls a hook with the frame at ptr.
func (g *guest) call(h abi.Hook, ptr uint32, frame []byte) uint64 {
	v, err := g.hooks[h].Call(context.Background(), ptr, uint32(len(frame)))
	if err != nil {
		g.t.Fatal(err)
	}
	return uint64(v)
}

func (g *guest) plan(h *abi.Header, f *abi.PlanFacts) uint64 {
	view, ptr := g.scratch()
	return g.call(abi.HookPlan, ptr, abi.AppendPlan(view, h, f))
}

func (g *guest) place(h *abi.Header, f *abi.PlaceFacts) abi.PlaceDecision {
	view, ptr := g.scratch()
	frame := abi.AppendPlace(view, h, f)
	d := abi.UnpackPlace(g.call(abi.HookPlace, ptr, frame))
	view, _ = g.scratch()
	abi.ReadScores(view[:len(frame)], h, f)
	return d
}

func (g *guest) mint(h *abi.Header, f *abi.MintFacts) uint64 {
	view, ptr := g.scratch()
	return g.call(abi.HookMint, ptr, abi.AppendMint(view, h, f))
}

func (g *guest) retain(h *abi.Header, f *abi.RetainFacts) uint64 {
	view, ptr := g.scratch()
	return g.call(abi.HookRetain, ptr, abi.AppendRetain(view, h, f))
}

func (g *guest) evict(h *abi.Header, f *abi.EvictFacts) uint64 {
	view, ptr := g.scratch()
	return g.call(abi.HookEvict, ptr, abi.AppendEvict(view, h, f))
}

// buildGo builds a folder of this module as a guest, with these build tags. With these flags and
// the cleared environment, the same source gives the same bytes everywhere.
func buildGo(t testing.TB, folder string, tags ...string) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "guest.wasm")
	cmd := exec.Command("go", "build", "-buildmode=c-shared", "-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid=", "-tags="+strings.Join(tags, ","), "-o", out, ".")
	cmd.Dir = folder
	cmd.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "GOWASM=", "GOEXPERIMENT=", "GOFLAGS=", "GOFIPS140=off", "GOWORK=off", "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", folder, err, text)
	}
	wasm, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return wasm
}
