package abi

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// A module that cannot be a plugin is rejected with a reason (rows 1 and 2).
func TestLoadRefuses(t *testing.T) {
	whole := newModule().bytes()
	for _, tt := range []struct {
		name string
		wasm []byte
		want string // words separated by |, one of which the reason must contain
	}{
		{"empty file", nil, "empty"},
		{"not wasm", []byte("#!/bin/sh\necho no\n"), "not WebAssembly"},
		{"header only", whole[:8], "marker"},
		{"cut off", whole[:len(whole)-3], "compile"},
		{"bad version", append([]byte("\x00asm\x02\x00\x00\x00"), whole[8:]...), "version|compile"},
		{"no marker", module(func(m *wasmModule) { m.exports = nil }), "marker"},
		{"unknown marker", module(func(m *wasmModule) { m.exports = []string{"proxy_abi_version_9_9_9"} }), "9.9.9|marker"},
		{"no allocator", module(func(m *wasmModule) { m.functions = nil }), "allocator"},
		{"no memory", module(func(m *wasmModule) { m.noMemory = true }), "memory"},
		{"too much memory", module(func(m *wasmModule) { m.memory = [2]int{2000, 0} }), "memory"},
		{"callback of another type", newModule().function("proxy_on_tick", "iii:I", "", "i64 1").bytes(), "proxy_on_tick"},
		{"vm_start false", newModule().function("proxy_on_vm_start", "ii:i", "", "i32 0").bytes(), "vm_start"},
		{"configure false", newModule().function("proxy_on_configure", "ii:i", "", "i32 0").bytes(), "configure"},
		{"vm_start traps", newModule().function("proxy_on_vm_start", "ii:i", "", "unreachable").bytes(), "vm_start"},
		{"configure traps", newModule().function("proxy_on_configure", "ii:i", "", "unreachable").bytes(), "configure"},
		{"configure loops", newModule().function("proxy_on_configure", "ii:i", "", "loop br 0 end i32 1").bytes(), "configure"},
		{"root context traps", newModule().function("proxy_on_context_create", "ii:", "", "unreachable").bytes(), "context_create"},
		{"initialize traps", newModule().function("_initialize", ":", "", "unreachable").bytes(), "_initialize"},
		{"initialize exits", newModule().function("_initialize", ":", "", "i32 3 call wasi_snapshot_preview1.proc_exit").bytes(), "_initialize"},
		{"initialize calls the proxy", newModule().function("_initialize", ":", "", `"plugin_name" i32 8 i32 12 call proxy_get_property drop`).bytes(), "_initialize"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.name == "configure loops" && testing.Short() {
				t.Skip("a start may take ten seconds")
			}
			file := filepath.Join(t.TempDir(), "bad.wasm")
			if err := os.WriteFile(file, tt.wasm, 0o600); err != nil {
				t.Fatal(err)
			}
			p := filter("culprit", file, "")
			p.Timeout = config.Duration(300 * time.Millisecond)
			why := refuse(t, p)
			found := false
			for word := range strings.SplitSeq(tt.want, "|") {
				found = found || strings.Contains(why, word)
			}
			if !found || !strings.Contains(why, "plugin[0]") || !strings.Contains(why, ` (culprit): `) {
				t.Errorf("the reason should name plugin[0], the culprit and one of %s: %s", tt.want, why)
			}
		})
	}
	t.Run("no file", func(t *testing.T) {
		if why := refuse(t, filter("culprit", "/nonexistent/x.wasm", "")); !strings.Contains(why, `plugin[0].path (culprit): `) {
			t.Error(why)
		}
	})
	t.Run("wrong digest", func(t *testing.T) {
		p := filter("culprit", writeModule(t, newModule()), "")
		p.SHA256 = strings.Repeat("0", 64)
		if why := refuse(t, p); !strings.Contains(why, `plugin[0].sha256 (culprit): `) {
			t.Error(why)
		}
	})
}

// module is a module with one thing changed.
func module(change func(*wasmModule)) []byte {
	m := newModule()
	change(m)
	return m.bytes()
}

// answersGlobal is a callback that answers 200 + global 0 with a local response.
const answersGlobal = `gget 0 i32 200 i32.add i32 0 i32 0 i32 0 i32 0 i32 0 i32 0 i32 -1 call proxy_send_local_response drop i32 1`

// Start functions are called in order, once each (row 3).
func TestStartFunctions(t *testing.T) {
	note := func(digit string) string { return "gget 0 i32 10 i32.mul i32 " + digit + " i32.add gset 0" }
	for _, tt := range []struct {
		name   string
		build  func(m *wasmModule)
		status int
	}{
		{"initialize and main", func(m *wasmModule) {
			m.function("main", "ii:i", "", note("3")+" i32 0").function("_initialize", ":", "", note("2"))
		}, 223},
		{"initialize", func(m *wasmModule) { m.function("_initialize", ":", "", note("2")) }, 202},
		{"start", func(m *wasmModule) { m.function("_start", ":", "", note("5")) }, 205},
		{"initialize and start", func(m *wasmModule) {
			m.function("_start", ":", "", note("5")).function("_initialize", ":", "", note("2"))
		}, 202},
		{"start and main", func(m *wasmModule) {
			m.function("_start", ":", "", note("5")).function("main", "ii:i", "", note("3")+" i32 0")
		}, 205},
		{"none", func(m *wasmModule) {}, 200},
		{"initialize logs", func(m *wasmModule) {
			m.function("_initialize", ":", "", note("2")+` i32 2 "hello" call proxy_log drop`)
		}, 202},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := newModule().function("proxy_on_request_headers", "iii:i", "", answersGlobal)
			tt.build(m)
			n := start(t, options{plugins: []config.Plugin{filter("f", writeModule(t, m), "")}})
			for range 3 { // on any instance
				if r := n.post(""); r.status != tt.status {
					t.Fatalf("got %d %s %v, want %d", r.status, r.body, r.err, tt.status)
				}
			}
		})
	}
}

// answersProperty answers with status 200 + the status of get_property, and the
// property as body.
const answersProperty = `"plugin_name" i32 8 i32 12 call proxy_get_property i32 200 i32.add
	i32 0 i32 0 i32 8 i32.load i32 12 i32.load i32 0 i32 0 i32 -1 call proxy_send_local_response drop i32 1`

// The allowed and forbidden actions of an allocator (row 4).
func TestAllocator(t *testing.T) {
	for _, tt := range []struct {
		name, alloc string
		check       func(r reply) bool
	}{
		{"right", `i32 16384`, func(r reply) bool { return r.status == 200 && r.body == "alloc" }},
		{"logs", `i32 2 "allocating" call proxy_log drop i32 16384`, func(r reply) bool { return r.status == 200 && r.body == "alloc" }},
		{"grows memory", `i32 1 memory.grow i32 65536 i32.mul`, func(r reply) bool { return r.status == 200 && r.body == "alloc" }},
		{"grows memory far", `i32 100 memory.grow i32 99 i32.add i32 65536 i32.mul`, func(r reply) bool { return r.status == 200 && r.body == "alloc" }},
		{"refuses", `i32 0`, refused},
		{"end of memory", `memory.size i32 65536 i32.mul i32 3 i32.sub`, refused},
		{"far outside", `i32 -1`, refused},
		{"calls the proxy", `"x" i32 0 i32 0 i32 0 call proxy_set_shared_data drop i32 16384`, failed},
		{"sends a reply", `i32 204 i32 0 i32 0 i32 0 i32 0 i32 0 i32 0 i32 -1 call proxy_send_local_response drop i32 16384`, failed},
		{"traps", `unreachable`, failed},
		{"loops", `loop br 0 end i32 0`, failed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := newModule()
			m.functions = nil
			m.function("proxy_on_memory_allocate", "i:i", "", tt.alloc).function("proxy_on_request_headers", "iii:i", "", answersProperty)
			p := filter("alloc", writeModule(t, m), "")
			p.Timeout = config.Duration(200 * time.Millisecond)
			n := start(t, options{plugins: []config.Plugin{p}})
			for range 2 {
				if r := n.post(""); !tt.check(r) {
					t.Fatalf("got %d %q %v", r.status, r.body, r.err)
				}
			}
		})
	}
	t.Run("malloc", func(t *testing.T) {
		m := newModule()
		m.functions[0].name = "malloc"
		m.function("proxy_on_request_headers", "iii:i", "", answersProperty)
		n := start(t, options{plugins: []config.Plugin{filter("alloc", writeModule(t, m), "")}})
		if r := n.post(""); r.status != 200 || r.body != "alloc" {
			t.Errorf("got %d %q", r.status, r.body)
		}
	})
}

// refused: the host function failed, and guest and host continued.
func refused(r reply) bool { return (r.status == 206 || r.status == 210) && r.body == "" }

// failed: the guest was replaced, and its request failed.
func failed(r reply) bool { return r.status >= 500 && r.err == nil }

// A reload with a module that fails keeps the working version (row 2).
func TestReloadKeepsTheGoodVersion(t *testing.T) {
	says := func(status string) *wasmModule {
		return newModule().function("proxy_on_request_headers", "iii:i", "",
			`i32 `+status+` i32 0 i32 0 i32 0 i32 0 i32 0 i32 0 i32 -1 call proxy_send_local_response drop i32 1`)
	}
	file := writeModule(t, says("201"))
	p := filter("f", file, "")
	p.Timeout = config.Duration(300 * time.Millisecond)
	n := start(t, options{plugins: []config.Plugin{p}})
	want := func(status int) {
		t.Helper()
		for range 4 {
			if r := n.post(""); r.status != status {
				t.Fatalf("got %d %s, want %d", r.status, r.body, status)
			}
		}
	}
	want(201)
	for _, bad := range [][]byte{
		[]byte("nonsense"),
		says("202").function("proxy_on_configure", "ii:i", "", "i32 0").bytes(),
		says("202").function("proxy_on_vm_start", "ii:i", "", "unreachable").bytes(),
		says("202").function("_initialize", ":", "", "unreachable").bytes(),
	} {
		replaceFile(t, file, bad)
		if status, body := n.reloadPlugin("f"); status != 409 || body == "" {
			t.Errorf("a bad version was answered by %d %s", status, body)
		}
		want(201)
	}
	replaceFile(t, file, says("203").bytes())
	if status, body := n.reloadPlugin("f"); status != 200 {
		t.Errorf("the good version: %d %s", status, body)
	}
	want(203)
	replaceFile(t, file, says("205").bytes())
	n.eventually("the changed file is noticed", func() bool { return n.post("").status == 205 })
	if status, _ := n.reloadPlugin("nobody"); status != 404 {
		t.Errorf("an unknown plugin: %d", status)
	}
}
