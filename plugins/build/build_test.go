package build

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The SDK of these tests has the form of the SDKs for TinyGo: host calls
// without body, stubs for other compilers, callbacks under //export.
// conformance/plugins builds plugins with the real SDKs.
var tinyFiles = map[string]string{
	"sdk/go.mod": "module example.com/sdk\n\ngo 1.19\n",
	"sdk/proxywasm/sdk.go": `package proxywasm

import "example.com/sdk/proxywasm/internal"

func SetHandler(f func() bool) { internal.Handler = f }

func Log(s string) { b := []byte(s); internal.ProxyLog(2, &b[0], len(b)) }

func Property() []byte {
	var raw *byte
	var size int
	internal.ProxyGetProperty(nil, 0, &raw, &size)
	return internal.Bytes(raw, size)
}
`,
	"sdk/proxywasm/internal/calls.go": `//go:build tinygo

package internal

//export proxy_log
func ProxyLog(level LogLevel, data *byte, size int) Status

//export proxy_get_property
func ProxyGetProperty(path *byte, pathSize int, value **byte, size *int) Status

//export proxy_record_metric
func ProxyRecordMetric(id uint32, value uint64) Status
`,
	"sdk/proxywasm/internal/stubs.go": `//go:build !tinygo

package internal

type Host interface{ ProxyLog(level LogLevel, data *byte, size int) Status }

var current Host

func Register(h Host) { current = h }

func ProxyLog(level LogLevel, data *byte, size int) Status { return current.ProxyLog(level, data, size) }

func ProxyGetProperty(path *byte, pathSize int, value **byte, size *int) Status { return 1 }

func ProxyRecordMetric(id uint32, value uint64) Status {
	return 0
}
`,
	"sdk/proxywasm/internal/callbacks.go": `package internal

import (
	"unsafe"

	"example.com/sdk/proxywasm/types"
)

type (
	LogLevel uint32
	Status   uint32
)

var Handler func() bool

func Bytes(p *byte, n int) []byte { return unsafe.Slice(p, n) }

//export proxy_abi_version_0_2_0
func abiVersion() {}

//export proxy_on_memory_allocate
func allocate(size uint) *byte { return &make([]byte, size)[0] }

//export proxy_on_request_headers
func onRequestHeaders(id uint32, count int, end bool) types.Action {
	if Handler() {
		return types.Pause
	}
	return 0
}

//export proxy_on_done
func onDone(id uint32) types.Status { return true }
`,
	"sdk/proxywasm/types/types.go": "package types\n\ntype Action uint32\n\nconst Pause Action = 1\n\ntype Status = bool\n",
	"plugin/go.mod": "module example.com/plugin\n\ngo 1.24\n\nrequire example.com/sdk v0.0.0\n\n" +
		"replace example.com/sdk => ../sdk\n",
	"plugin/main.go": `package main

import "example.com/sdk/proxywasm"

func main() { proxywasm.SetHandler(func() bool { proxywasm.Log("seen"); return len(proxywasm.Property()) > 0 }) }
`,
}

// writeFiles makes a folder with those files; changes replace some of them.
func writeFiles(t *testing.T, files map[string]string, changes ...string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		for i := 0; i+1 < len(changes); i += 2 {
			if changes[i] == name {
				text = changes[i+1]
			}
		}
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// digest is a fingerprint of all files below a folder.
func digest(t *testing.T, dir string) [32]byte {
	t.Helper()
	var all bytes.Buffer
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		all.WriteString(path)
		all.Write(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return sha256.Sum256(all.Bytes())
}

func TestTinyGoSDK(t *testing.T) {
	dir := writeFiles(t, tinyFiles)
	before := digest(t, dir)
	output := filepath.Join(t.TempDir(), "out.wasm")
	var log bytes.Buffer
	r, err := Build(t.Context(), Options{Dir: filepath.Join(dir, "plugin"), Output: output, Log: &log})
	if err != nil {
		t.Fatalf("%v\n%s", err, log.String())
	}
	if r.SDK != "example.com/sdk" || r.Version != "" || r.Output != output || !strings.HasPrefix(r.Toolchain, "go1.") {
		t.Errorf("result %+v", r)
	}
	module, err := os.ReadFile(output)
	if err != nil {
		t.Fatal(err)
	}
	if int64(len(module)) != r.SizeBytes {
		t.Errorf("size %d, file has %d bytes", r.SizeBytes, len(module))
	}
	names, err := exports(module)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"_initialize", "memory", "proxy_abi_version_0_2_0", "proxy_on_memory_allocate",
		"proxy_on_request_headers", "proxy_on_done"} {
		if !slices.Contains(names, want) {
			t.Errorf("%s is not exported, only %v", want, names)
		}
	}
	for _, want := range []string{"proxy_log", "proxy_get_property"} {
		if !bytes.Contains(module, []byte("\x03env"+string(rune(len(want)))+want)) {
			t.Errorf("%s is not imported", want)
		}
	}
	if digest(t, dir) != before {
		t.Error("the folders of plugin or SDK changed")
	}
}

func TestRefusals(t *testing.T) {
	type change = []string
	tests := []struct {
		name   string
		dir    string
		change change
		is     error
		says   string // text in the error or the log
	}{
		{"compile error", "plugin", change{"plugin/main.go", "package main\n\nfunc main() { undefined() }\n"}, ErrCompile, "main.go:3:15: undefined: undefined"},
		{"syntax error", "plugin", change{"plugin/main.go", "package main\n\nfunc main( {}\n"}, ErrCompile, "main.go:3"},
		{"no marker", "plugin", change{"plugin/main.go", "package main\n\nfunc main() {}\n"}, nil, "proxy_abi_version_"},
		{"no main", "sdk/proxywasm", nil, nil, "package proxywasm: a plugin is a package main"},
		{"no source", "sdk", nil, ErrNoPlugin, "pdproxy plugin new"},
		{"no abi", "plugin", change{"plugin/main.go", "package main\n\nimport _ \"github.com/pdproxy/pdproxy/abi/guest\"\n\nfunc main() {}\n"}, ErrLoad, "main.go:3:8: no required module provides package github.com/pdproxy/pdproxy/abi/guest"},
		{"bad go.mod", "plugin", change{"plugin/go.mod", "module\n"}, ErrLoad, "usage: module module/path"},
		{"no folder", "absent", nil, fs.ErrNotExist, ""},
		{"a file", "plugin/main.go", nil, nil, "is not a folder"},
		{"unknown import", "plugin", change{"plugin/main.go", "package main\n\nimport _ \"example.com/other\"\n\nfunc main() {}\n"}, ErrLoad, "example.com/other"},
		{"odd host call", "plugin", change{"sdk/proxywasm/internal/calls.go",
			"//go:build tinygo\n\npackage internal\n\n//export proxy_log\nfunc ProxyLog(m map[string]int)\n"}, nil, "map[string]int"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := writeFiles(t, tinyFiles, tt.change...)
			var log bytes.Buffer
			_, err := Build(t.Context(), Options{Dir: filepath.Join(dir, tt.dir), Output: filepath.Join(dir, "out.wasm"), Log: &log})
			if err == nil {
				t.Fatal("the plugin was built")
			}
			if tt.is != nil && !errors.Is(err, tt.is) {
				t.Errorf("got error %v, want %v", err, tt.is)
			}
			if !strings.Contains(err.Error()+log.String(), tt.says) {
				t.Errorf("the error (%v) and the log lack %q:\n%s", err, tt.says, log.String())
			}
			left, err := filepath.Glob(filepath.Join(dir, "*.wasm*"))
			if hidden, _ := filepath.Glob(filepath.Join(dir, ".*.wasm*")); err != nil || len(left)+len(hidden) > 0 {
				t.Errorf("remaining files: %v %v %v", left, hidden, err)
			}
		})
	}
}

func TestNoToolchain(t *testing.T) {
	dir := writeFiles(t, tinyFiles)
	o := Options{Dir: filepath.Join(dir, "plugin"), Log: &bytes.Buffer{}}
	t.Run("go", func(t *testing.T) {
		t.Setenv("PATH", t.TempDir())
		if _, err := Build(t.Context(), o); !errors.Is(err, ErrNoGo) {
			t.Errorf("got error %v", err)
		}
	})
	t.Run("old go", func(t *testing.T) {
		bin := t.TempDir()
		script := "#!/bin/sh\necho '{\"GOVERSION\":\"go1.23.4\"}'\n"
		if err := os.WriteFile(filepath.Join(bin, "go"), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		t.Setenv("PATH", bin)
		if _, err := Build(t.Context(), o); err == nil || !strings.Contains(err.Error(), "go1.23.4 is too old") {
			t.Errorf("got error %v", err)
		}
	})
	t.Run("tinygo", func(t *testing.T) {
		tinyless(t)
		o.TinyGo = true
		if _, err := Build(t.Context(), o); !errors.Is(err, ErrNoTinyGo) {
			t.Errorf("got error %v", err)
		}
	})
}

// TestNoCompiler: the error names the compiler that is missing, and the command that installs it.
func TestNoCompiler(t *testing.T) {
	const cargo, prints = "#!/bin/sh\n", "#!/bin/sh\necho /absent/wasm-ld\n"
	for name, tt := range map[string]struct {
		source   string
		programs map[string]string
		want     error
	}{
		"no cargo":   {"Cargo.toml", nil, ErrNoRust},
		"no rustc":   {"Cargo.toml", map[string]string{"cargo": cargo}, ErrNoRust},
		"no target":  {"Cargo.toml", map[string]string{"cargo": cargo, "rustc": prints}, ErrNoTarget},
		"old rustc":  {"Cargo.toml", map[string]string{"cargo": cargo, "rustc": "#!/bin/sh\nexit 1\n"}, ErrNoTarget},
		"no clang":   {"plugin.c", nil, ErrNoClang},
		"no wasm-ld": {"plugin.c", map[string]string{"clang": prints}, ErrNoLinker},
		"no source":  {"plugin.zig", nil, ErrNoPlugin},
	} {
		t.Run(name, func(t *testing.T) {
			dir, bin := writeFiles(t, map[string]string{tt.source: ""}), t.TempDir()
			for program, text := range tt.programs {
				if err := os.WriteFile(filepath.Join(bin, program), []byte(text), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			t.Setenv("PATH", bin)
			var log bytes.Buffer
			if _, err := Build(t.Context(), Options{Dir: dir, Log: &log}); !errors.Is(err, tt.want) || log.Len() > 0 {
				t.Errorf("got error %v, log %s", err, log.String())
			}
		})
	}
}

// TestNoModule: a folder without go.mod gets an error of its own, and no output of the
// go command.
func TestNoModule(t *testing.T) {
	dir := writeFiles(t, map[string]string{"first/main.go": "package main\n\nfunc main() {}\n"})
	t.Setenv("GO111MODULE", "on")
	var log bytes.Buffer
	_, err := Build(t.Context(), Options{Dir: filepath.Join(dir, "first"), Log: &log})
	if !errors.Is(err, ErrLoad) || !strings.Contains(err.Error(), "it has no go.mod") || strings.Contains(log.String()+err.Error(), "go:") {
		t.Errorf("got error %v, log %s", err, log.String())
	}
}

// tinyless returns a PATH with go and without tinygo.
func tinyless(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("go")
	if err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	if err := os.Symlink(path, filepath.Join(bin, "go")); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin)
	return bin
}

// tinyGoPrints is the answer of tinygo version.
const tinyGoPrints = "tinygo version 0.37.0 linux/amd64 (using go version go1.24.0 and LLVM version 19.1.7)"

// TestTinyGoCommand runs a stand-in that records its arguments: a main that
// does something needs _start, an empty one a reactor. Neither has a scheduler.
func TestTinyGoCommand(t *testing.T) {
	for _, tt := range []struct{ name, main, want string }{
		{"main registers", tinyFiles["plugin/main.go"], ""},
		{"main is empty", "package main\n\nimport \"example.com/sdk/proxywasm\"\n\nfunc init() { proxywasm.SetHandler(nil) }\n\nfunc main() {}\n", "-buildmode=c-shared"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := writeFiles(t, tinyFiles, "plugin/main.go", tt.main)
			bin := tinyless(t)
			args := filepath.Join(dir, "args")
			script := "#!/bin/sh\nif [ $1 = version ]; then echo '" + tinyGoPrints + "'; else echo \"$@\" > " + args + "; fi\n"
			if err := os.WriteFile(filepath.Join(bin, "tinygo"), []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
			_, err := Build(t.Context(), Options{Dir: filepath.Join(dir, "plugin"), TinyGo: true, Log: &bytes.Buffer{}})
			if !errors.Is(err, errNotWasm) {
				t.Errorf("an empty file was accepted: %v", err)
			}
			got, err := os.ReadFile(args)
			if err != nil {
				t.Fatal(err)
			}
			words := strings.Fields(string(got))
			if len(words) < 6 || !slices.Equal(words[:4], []string{"build", "-target=wasip1", "-scheduler=none", "-o"}) || strings.Join(words[5:len(words)-1], " ") != tt.want {
				t.Errorf("tinygo %s", got)
			}
		})
	}
}

// TestTinyGoVersion: the result names the version of TinyGo.
func TestTinyGoVersion(t *testing.T) {
	for name, tt := range map[string]struct{ script, want, wantErr string }{
		"release": {"echo '" + tinyGoPrints + "'", "tinygo 0.37.0", ""},
		"newer":   {"echo 'tinygo version 0.41.1 linux/amd64'", "tinygo 0.41.1", ""},
		"next":    {"echo 'tinygo version 1.0.0 linux/amd64'", "tinygo 1.0.0", ""},
		"old":     {"echo 'tinygo version 0.33.0 linux/amd64 (using go version go1.22.5 and LLVM version 16.0.1)'", "", "tinygo 0.33.0 is too old: plugins need TinyGo 0.37 or later"},
		"older":   {"echo 'tinygo version 0.36.0 linux/amd64'", "", "tinygo 0.36.0 is too old"},
		"dev":     {"echo 'tinygo version 0.35.0-dev-6e6507bf linux/amd64'", "", "tinygo 0.35.0-dev-6e6507bf is too old"},
		"other":   {"echo hello", "", `unknown answer "hello"`},
		"fails":   {"exit 3", "", "exit status 3"},
	} {
		t.Run(name, func(t *testing.T) {
			bin := tinyless(t)
			if err := os.WriteFile(filepath.Join(bin, "tinygo"), []byte("#!/bin/sh\n"+tt.script+"\n"), 0o755); err != nil {
				t.Fatal(err)
			}
			dir := filepath.Join(writeFiles(t, tinyFiles), "plugin")
			j, err := prepare(t.Context(), dir, Options{TinyGo: true, Log: &bytes.Buffer{}})
			if tt.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), tt.wantErr) {
					t.Errorf("got error %v", err)
				}
				return
			}
			if err != nil || j.result.Toolchain != tt.want {
				t.Errorf("toolchain %+v, error %v", j, err)
			}
		})
	}
}

// TestInterrupted ends the compiler by the context.
func TestInterrupted(t *testing.T) {
	dir := writeFiles(t, tinyFiles)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Build(ctx, Options{Dir: filepath.Join(dir, "plugin"), Log: &bytes.Buffer{}}); !errors.Is(err, context.Canceled) {
		t.Errorf("got error %v", err)
	}
}
