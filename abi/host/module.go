package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"

	"github.com/pdproxy/pdproxy/abi/host/meter"
)

// PageSize is the unit of a guest's memory, in bytes.
const PageSize = 64 << 10

// maxPages is the number of pages that 32 bits can address.
const maxPages = 1 << 16

// Cache keeps compiled code for all modules of a process and, with a directory,
// from one process to the next. It is safe for concurrent use.
type Cache struct{ cache wazero.CompilationCache }

// NewCache returns a cache in dir. It makes the directory if needed. With dir
// "" the compiled code stays in memory only, as long as a module uses it.
// Anyone who can write to dir can run code in this process.
func NewCache(dir string) (*Cache, error) {
	if dir == "" {
		return &Cache{cache: wazero.NewCompilationCache()}, nil
	}
	c, err := wazero.NewCompilationCacheWithDir(dir)
	if err != nil {
		return nil, fmt.Errorf("open compile cache: %w", err)
	}
	return &Cache{cache: c}, nil
}

// Close frees the cache. Close every module that was loaded with it first.
func (c *Cache) Close(ctx context.Context) error { return c.cache.Close(ctx) }

// LoadOptions is how Load compiles a module.
type LoadOptions struct {
	// Guarded compiles checks into the guest, so that the end of a call's context, or
	// VM.Interrupt, interrupts the guest, and its stack and tables have limits. Without Guarded
	// nothing can interrupt a call, and a call that does not end stops the whole process at
	// the next collection of garbage.
	Guarded bool
	// MemoryPages is the limit of each VM's memory in pages of 64 KiB; 0: 65536. The tables of a guarded
	// module count too, above 256 KiB.
	MemoryPages uint32
	// TotalMemory is the limit of the memory of all VMs together, in bytes; 0: no limit. A VM that
	// reaches the total gets the same result as at its own limit. NewVM fails when the total leaves
	// no room for a VM's start.
	TotalMemory uint64
	// Cache is where the host looks up and stores compiled code; nil: no cache.
	Cache *Cache
	// HostFunctions are the names of the host functions that the guest may use;
	// "*" and nil mean all of them. The other functions return
	// INTERNAL_FAILURE; those of WASI return NOTCAPABLE (76).
	HostFunctions []string
	// CompileWorkers is the number of goroutines that compile; 0: 1. There are fewer when the
	// functions of the module are so large that their compilation would take too much memory.
	CompileWorkers int
	// Compiling is called when the compilation of the module begins; not for a module whose code is
	// in Cache. nil: not called.
	Compiling func()
}

// Info is the description of a module.
type Info struct {
	// ABIVersion is the version of proxy-wasm, 0.1.0, 0.2.0 or 0.2.1, or that
	// of Higress' SDK, 0.2.100. It is empty for a module that has only hooks.
	ABIVersion string
	// Hooks are the exports named pdproxy_v1_on_*, sorted.
	Hooks []string
	// Callbacks are the exported callbacks of proxy-wasm, sorted.
	Callbacks []string
	// Imports are the imported functions as "module.name", sorted.
	Imports []string
	// SizeBytes is the size of the binary.
	SizeBytes int
	// CompileTime is the duration of the compilation, or of the look-up in the
	// cache.
	CompileTime time.Duration
}

// Module is one compiled guest with an engine of its own, so that it shares no
// limits and no memory with other modules. It is safe for concurrent use; its
// VMs are not.
type Module struct {
	runtime  wazero.Runtime
	compiled wazero.CompiledModule
	info     Info
	guarded  bool
	pages    uint32
	minPages uint32
	tables   uint64 // bytes of tables and variables that count for each VM
	total    memoryTotal
	v010     bool
	exports  map[string]api.FunctionDefinition
	has      [callbackCount]bool
}

// Load compiles a module and checks that it can run: a known marker or at least
// one hook, an allocator, only imports that exist, and callbacks and hooks with
// the signatures of the specification. The end of ctx does not stop it. A module whose compilation
// would take too much time or memory is refused before, with ErrTooLarge.
func Load(ctx context.Context, wasm []byte, opts LoadOptions) (*Module, error) {
	// The meter reads these features. It does not count the memory for debug information of compilers,
	// and nothing shows this information.
	config := wazero.NewRuntimeConfig().WithCoreFeatures(api.CoreFeaturesV2).WithDebugInfoEnabled(false)
	if opts.Cache != nil {
		config = config.WithCompilationCache(opts.Cache.cache)
	}
	m := &Module{
		runtime: wazero.NewRuntimeWithConfig(ctx, config),
		guarded: opts.Guarded,
		pages:   opts.MemoryPages,
	}
	if m.pages == 0 || m.pages > maxPages {
		m.pages = maxPages
	}
	if err := m.load(ctx, wasm, opts); err != nil {
		_ = m.Close(ctx)
		return nil, err
	}
	return m, nil
}

// load compiles the guest into a module whose runtime exists.
func (m *Module) load(ctx context.Context, wasm []byte, opts LoadOptions) error {
	if err := checkPreamble(wasm); err != nil {
		return err
	}
	began := time.Now()
	size := len(wasm)
	if size > MaxSize {
		return fmt.Errorf("load module: %w: it has %d bytes, the limit is %d", ErrTooLarge, size, MaxSize)
	}
	code, err := meter.Read(wasm)
	if err != nil {
		return fmt.Errorf("compile module: %w", err)
	}
	if m.guarded {
		if m.tables, err = tableMemory(code); err != nil {
			return err
		}
		m.tables -= min(m.tables, freeTables)
	}
	workers, err := code.Check(max(opts.CompileWorkers, 1))
	if err != nil {
		return fmt.Errorf("load module: %w", err)
	}
	code.JoinData()
	if m.guarded {
		wasm = code.Meter()
	} else {
		wasm = code.Encode(wasm)
	}
	compiled, err := m.runtime.CompileModule(compileContext(ctx, workers, opts.Compiling), wasm)
	if err != nil {
		return fmt.Errorf("compile module: %w", err)
	}
	m.compiled = compiled
	dropBodies(compiled)
	m.total.limit = opts.TotalMemory
	m.exports = compiled.ExportedFunctions()
	m.info = Info{SizeBytes: size, CompileTime: time.Since(began)}
	if err := m.readExports(); err != nil {
		return err
	}
	if err := m.checkMemory(); err != nil {
		return err
	}
	if m.guarded {
		if err := m.linkMeter(ctx); err != nil {
			return err
		}
	}
	return m.link(ctx, opts.HostFunctions)
}

// compileContext returns the context of a compilation with so many workers. begins may be nil.
func compileContext(ctx context.Context, workers int, begins func()) context.Context {
	counted := experimental.WithCompilationWorkers(ctx, workers)
	if begins == nil {
		return counted
	}
	return &watchedContext{Context: counted, plain: ctx, begins: begins}
}

// watchedContext calls begins when wazero reads the number of workers. wazero reads the number once
// in a compilation, and not if its cache has the code: engine.compileModule in
// internal/engine/wazevo/engine.go of wazero 1.12. wazero has no other sign of a compilation.
type watchedContext struct {
	context.Context
	plain  context.Context // without the number of workers
	begins func()
}

// Value implements context.Context.
func (c *watchedContext) Value(key any) any {
	v := c.Context.Value(key)
	if v != nil && c.plain.Value(key) == nil {
		c.begins()
	}
	return v
}

// dropBodies frees the bodies of the functions, which nothing reads after the compilation. The
// engine would keep the bodies in a private field as long as the module exists.
func dropBodies(compiled wazero.CompiledModule) {
	module := reflect.ValueOf(compiled).Elem().FieldByName("module")
	if module.Kind() != reflect.Pointer {
		return
	}
	code := reflect.NewAt(module.Type().Elem(), module.UnsafePointer()).Elem().FieldByName("CodeSection")
	if code.Kind() == reflect.Slice {
		code.Set(reflect.MakeSlice(code.Type(), code.Len(), code.Len()))
	}
}

// MaxSize is the size in bytes of the largest module that Load takes.
const MaxSize = 32 << 20

// ErrTooLarge reports that the compilation of a module would take too much time or memory.
var ErrTooLarge = meter.ErrTooLarge

// ErrNotWasm reports that a file is not WebAssembly at all.
var ErrNotWasm = errors.New("the file is not WebAssembly")

// ErrComponent reports that a file is a component of the component model, which
// wraps modules.
var ErrComponent = errors.New("the file is a WebAssembly component, and plugins are core modules (with Rust: build for wasm32-unknown-unknown)")

// checkPreamble checks the first eight bytes: the magic number, and a version of
// two halves, of which the second distinguishes modules and components.
func checkPreamble(wasm []byte) error {
	rest, ok := bytes.CutPrefix(wasm, []byte("\x00asm"))
	switch {
	case !ok:
		return ErrNotWasm
	case len(rest) >= 4 && rest[2] == 1 && rest[3] == 0:
		return ErrComponent
	}
	return nil
}

// marker is the prefix of the export that names the version of proxy-wasm.
const marker = "proxy_abi_version_"

// higressVersion is the marker of higress-group/proxy-wasm-go-sdk. It means
// 0.2.0 plus host functions of Higress' own, which are unknown imports here.
const higressVersion = "0.2.100"

// hookPrefix is the prefix of the name of every hook.
const hookPrefix = "pdproxy_v1_on_"

// readExports finds the marker, the callbacks and the hooks and checks their
// types.
func (m *Module) readExports() error {
	var unknown string
	for _, name := range slices.Sorted(maps.Keys(m.exports)) {
		def := m.exports[name]
		switch {
		case strings.HasPrefix(name, marker):
			switch version := strings.ReplaceAll(name[len(marker):], "_", "."); version {
			case "0.1.0", "0.2.0", "0.2.1", higressVersion:
				m.info.ABIVersion = version
			default:
				unknown = version
			}
		case strings.HasPrefix(name, "pdproxy_"):
			if err := checkHook(name, def); err != nil {
				return err
			}
			if strings.HasPrefix(name, hookPrefix) {
				m.info.Hooks = append(m.info.Hooks, name)
			}
		default:
			if err := checkCallback(name, def); err != nil {
				return err
			}
			if c, ok := callbackNamed(name); ok {
				m.has[c] = true
				m.info.Callbacks = append(m.info.Callbacks, name)
			}
		}
	}
	m.v010 = m.info.ABIVersion == "0.1.0"
	switch {
	case m.info.ABIVersion == "" && unknown != "":
		return fmt.Errorf("load module: unknown ABI version %s, known are 0.1.0, 0.2.0 and 0.2.1", unknown)
	case m.info.ABIVersion == "" && len(m.info.Hooks) == 0:
		return errors.New("load module: neither a proxy-wasm marker (proxy_abi_version_0_2_1) nor a hook (pdproxy_v1_on_...) is exported")
	case m.info.ABIVersion != "" && m.allocatorName() == "":
		return errors.New("load module: no allocator: export proxy_on_memory_allocate or malloc")
	case len(m.info.Hooks) > 0 && m.exports[scratchExport] == nil:
		return fmt.Errorf("load module: hooks need the export %s", scratchExport)
	}
	return nil
}

// checkMemory rejects a module whose memory is imported or larger than the limit.
func (m *Module) checkMemory() error {
	if len(m.compiled.ImportedMemories()) > 0 {
		return errors.New("load module: memory must be exported, not imported")
	}
	memory, ok := m.compiled.ExportedMemories()["memory"]
	if !ok {
		return errors.New(`load module: no memory is exported as "memory"`)
	}
	m.minPages = memory.Min()
	if m.minPages > m.pages {
		return fmt.Errorf("load module: needs %d pages of memory at least, the limit is %d", m.minPages, m.pages)
	}
	if least, limit := uint64(m.minPages)*PageSize+m.tables, uint64(m.pages)*PageSize; least > limit {
		return fmt.Errorf("load module: needs %d bytes of memory and tables at least, the limit is %d", least, limit)
	}
	return nil
}

// allocatorName returns the export that allocates guest memory for the host:
// the specification's one first, else malloc.
func (m *Module) allocatorName() string {
	for _, name := range []string{"proxy_on_memory_allocate", "malloc"} {
		if m.exports[name] != nil {
			return name
		}
	}
	return ""
}

// Info returns the description of the module. All calls return the same slices:
// do not change them.
func (m *Module) Info() Info { return m.info }

// Close frees the module and every VM of it. No call may be running.
func (m *Module) Close(ctx context.Context) error {
	err := m.runtime.Close(ctx)
	if m.compiled != nil {
		err = errors.Join(err, m.compiled.Close(ctx))
	}
	return err
}
