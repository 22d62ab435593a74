package host

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"
)

// policyModule has a hook and no marker, like a freestanding C guest.
func policyModule() *assembler {
	a := newAssembler()
	a.fn("pdproxy_v1_scratch", "i", "i", i32(4096))
	return a
}

func TestLoadRefuses(t *testing.T) {
	tests := []struct {
		name string
		wasm func() []byte
		opts LoadOptions
		want string
	}{
		{"nothing", func() []byte { return nil }, LoadOptions{}, "the file is not WebAssembly"},
		{"an ELF program", func() []byte { return []byte("\x7fELF\x02\x01\x01\x00") }, LoadOptions{}, "the file is not WebAssembly"},
		{"a component", func() []byte { return []byte("\x00asm\x0d\x00\x01\x00") }, LoadOptions{}, "is a WebAssembly component"},
		{"corrupt", func() []byte { return newAssembler().marker("0_2_1").bytes()[:40] }, LoadOptions{}, "compile module"},
		{"no marker", func() []byte { return newAssembler().bytes() }, LoadOptions{}, "neither a proxy-wasm marker"},
		{"unknown marker", func() []byte {
			a := newAssembler()
			a.fn("proxy_abi_version_0_2_101", "", "")
			return a.bytes()
		}, LoadOptions{}, "unknown ABI version 0.2.101"},
		{"no allocator", func() []byte {
			a := newAssembler()
			a.fn("proxy_abi_version_0_2_0", "", "")
			return a.bytes()
		}, LoadOptions{}, "no allocator"},
		{"no scratch", func() []byte {
			a := newAssembler()
			a.fn("pdproxy_v1_on_mint", "ii", "I", i64(1))
			return a.bytes()
		}, LoadOptions{}, "need the export pdproxy_v1_scratch"},
		{"hook type", func() []byte {
			a := policyModule()
			a.fn("pdproxy_v1_on_mint", "i", "I", i64(1))
			return a.bytes()
		}, LoadOptions{}, "export pdproxy_v1_on_mint has the wrong type (i32) -> (i64)"},
		{"callback type", func() []byte {
			a := newAssembler().marker("0_2_0")
			a.fn("proxy_on_tick", "", "")
			return a.bytes()
		}, LoadOptions{}, "export proxy_on_tick has the wrong type"},
		{"unknown imports", func() []byte {
			a := newAssembler()
			a.importFunc("env", "proxy_fly", "i", "i")
			a.importFunc("wasi_snapshot_preview1", "fly", "i", "i")
			a.importFunc("go", "fly", "i", "i")
			return a.marker("0_2_1").bytes()
		}, LoadOptions{}, "unknown import env.proxy_fly\nunknown import wasi_snapshot_preview1.fly\nunknown import go.fly"},
		{"import type", func() []byte {
			a := newAssembler()
			a.importFunc("env", "proxy_log", "ii", "i")
			return a.marker("0_2_1").bytes()
		}, LoadOptions{}, "import env.proxy_log has the wrong type (i32, i32) -> (i32)"},
		{"no memory", func() []byte {
			a := newAssembler()
			a.noMemory = true
			a.fn("proxy_abi_version_0_2_1", "", "")
			a.fn("malloc", "i", "i", i32(0))
			return a.bytes()
		}, LoadOptions{}, "no memory is exported"},
		{"too much memory", func() []byte {
			a := newAssembler().marker("0_2_1")
			a.memoryMin = 3
			return a.bytes()
		}, LoadOptions{MemoryPages: 2}, "needs 3 pages of memory at least, the limit is 2"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Load(t.Context(), tt.wasm(), tt.opts)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestInfo(t *testing.T) {
	a := newAssembler()
	a.importFunc("wasi_snapshot_preview1", "random_get", "ii", "i")
	a.importFunc("env", "proxy_log", "iii", "i")
	a.importFunc("env", "proxy_log", "iii", "i")
	a.marker("0_2_0")
	a.fn("proxy_on_tick", "i", "")
	a.fn("proxy_on_configure", "ii", "i", i32(1))
	a.fn("proxy_on_request_metadata", "ii", "i", i32(0)) // emscripten guests export it
	a.fn("pdproxy_v1_scratch", "i", "i", i32(4096))
	a.fn("pdproxy_v1_on_plan", "ii", "I", i64(0))
	a.fn("pdproxy_v1_on_finish", "ii", "")
	wasm := a.bytes()
	m := load(t, wasm, LoadOptions{})
	got := m.Info()
	if got.ABIVersion != "0.2.0" || got.SizeBytes != len(wasm) || got.CompileTime <= 0 {
		t.Errorf("got %+v", got)
	}
	if want := []string{"pdproxy_v1_on_finish", "pdproxy_v1_on_plan"}; !slices.Equal(got.Hooks, want) {
		t.Errorf("hooks %v, want %v", got.Hooks, want)
	}
	if want := []string{"proxy_on_configure", "proxy_on_tick"}; !slices.Equal(got.Callbacks, want) {
		t.Errorf("callbacks %v, want %v", got.Callbacks, want)
	}
	if want := []string{"env.proxy_log", "wasi_snapshot_preview1.random_get"}; !slices.Equal(got.Imports, want) {
		t.Errorf("imports %v, want %v", got.Imports, want)
	}
	vm := start(t, m, newWorld())
	if !vm.Has(OnTick) || vm.Has(OnRequestHeaders) {
		t.Error("Has disagrees with the exports")
	}
}

// Every module can be closed without an effect on its cached code or on another
// module's VM.
func TestCacheIsShared(t *testing.T) {
	ctx := t.Context()
	for _, dir := range []string{"", t.TempDir()} {
		cache, err := NewCache(dir)
		if err != nil {
			t.Fatal(err)
		}
		a := policyModule()
		a.fn("pdproxy_v1_on_mint", "ii", "I", i64(42))
		wasm := a.bytes()
		first, err := Load(ctx, wasm, LoadOptions{Cache: cache})
		if err != nil {
			t.Fatal(err)
		}
		second, err := Load(ctx, wasm, LoadOptions{Cache: cache})
		if err != nil {
			t.Fatal(err)
		}
		vm, err := second.NewVM(ctx, newWorld())
		if err != nil {
			t.Fatal(err)
		}
		if err := first.Close(ctx); err != nil {
			t.Fatal(err)
		}
		hook, _ := vm.Hook("pdproxy_v1_on_mint")
		if id, err := hook.Call(ctx, 0, 0); id != 42 || err != nil {
			t.Errorf("got %d, %v", id, err)
		}
		if err := second.Close(ctx); err != nil {
			t.Fatal(err)
		}
		if err := cache.Close(ctx); err != nil {
			t.Fatal(err)
		}
		if files, _ := os.ReadDir(dir); dir != "" && len(files) == 0 {
			t.Error("the directory is empty")
		}
	}
}

// TestCompiling: Compiling is called for a module that is compiled, and not for one whose code the
// cache has, in memory or in a directory.
func TestCompiling(t *testing.T) {
	wasm, dir := newAssembler().marker("0_2_1").bytes(), t.TempDir()
	open := func(dir string) *Cache {
		c, err := NewCache(dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close(context.Background()) })
		return c
	}
	memory := open("")
	for _, tt := range []struct {
		name    string
		cache   *Cache
		guarded bool
		want    int
	}{
		{"no cache", nil, false, 1}, {"no cache again", nil, false, 1},
		{"memory", memory, true, 1}, {"memory again", memory, true, 0}, {"memory, another form", memory, false, 1},
		{"directory", open(dir), true, 1}, {"directory, next process", open(dir), true, 0},
	} {
		began := 0
		m, err := Load(t.Context(), wasm, LoadOptions{Guarded: tt.guarded, Cache: tt.cache, CompileWorkers: 2, Compiling: func() { began++ }})
		if err != nil {
			t.Fatal(tt.name, err)
		}
		t.Cleanup(func() { m.Close(context.Background()) }) // the code stays in memory as long as a module uses it
		if began != tt.want {
			t.Errorf("%s: %d compilations began, want %d", tt.name, began, tt.want)
		}
	}
}
