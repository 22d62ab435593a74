//go:build authors

package plugins

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/plugins/build"
)

// tinyGos are the releases of TinyGo that TINYGO_VERSION may choose, each with the GOTOOLCHAIN
// that it runs with: TinyGo rejects a newer Go than minorMax of its builder/config.go.
var tinyGos = map[string]string{
	"0.37.0": "go1.24.0",
	"0.39.0": "go1.25.0",
	"0.41.0": "local",
}

// newestTinyGo is the newest release that the Go module proxy has with all its dependencies.
const newestTinyGo = "0.41.0"

// The files of Debian that replace the libraries in TinyGo's folder lib. These are git submodules
// there, which a module of the Go module proxy does not contain.
const (
	wasiHeaders  = "/usr/include/wasm32-wasi"
	wasiLibrary  = "/usr/lib/wasm32-wasi/libc.a"
	wasmBuiltins = "/usr/lib/llvm-19/lib/clang/19/lib/wasi/libclang_rt.builtins-wasm32.a"
)

// installTinyGo puts a release of TinyGo at the front of PATH, before any other tinygo. The first
// run builds TinyGo from the Go module proxy with Debian's LLVM and keeps it in build/tinygo.
func installTinyGo() error {
	version := cmp.Or(os.Getenv("TINYGO_VERSION"), newestTinyGo)
	toolchain, ok := tinyGos[version]
	if !ok {
		return fmt.Errorf("TINYGO_VERSION: %q is none of 0.37.0, 0.39.0, 0.41.0", version)
	}
	err := testbed.Install(func() error {
		var missing error
		for _, file := range []string{"/usr/lib/llvm-19/include/llvm-c", "/usr/lib/llvm-19/lib/libclang.so",
			"/usr/lib/llvm-19/bin/clang", "/usr/lib/llvm-19/bin/wasm-ld", "/usr/bin/wasm-opt", "/usr/bin/g++",
			wasiHeaders, wasiLibrary, wasmBuiltins} {
			_, err := os.Stat(file)
			missing = errors.Join(missing, err)
		}
		return missing
	}, "llvm-19-dev", "libclang-19-dev", "clang-19", "lld-19", "binaryen", "g++", "wasi-libc", "libclang-rt-19-dev-wasm32")
	if err != nil {
		return err
	}
	root, err := filepath.Abs("../../build/tinygo/" + version)
	if err != nil {
		return err
	}
	if _, err := os.Stat(root); err != nil {
		if err := buildTinyGo(version, toolchain, root); err != nil {
			return fmt.Errorf("build TinyGo %s: %w", version, err)
		}
	}
	return os.Setenv("PATH", root+string(os.PathListSeparator)+os.Getenv("PATH"))
}

// buildTinyGo makes the folder root: TinyGo's sources, bin/tinygo, which finds the sources by its
// own path, and tinygo, which starts bin/tinygo with the toolchain. The go.mod and go.sum of TinyGo
// determine its dependencies.
func buildTinyGo(version, toolchain, root string) error {
	out, err := exec.Command("go", "mod", "download", "-json", "github.com/tinygo-org/tinygo@v"+version).Output()
	if err != nil {
		return fmt.Errorf("go mod download: %w\n%s", err, out)
	}
	var module struct{ Dir string }
	if err := json.Unmarshal(out, &module); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(root), 0o755); err != nil {
		return err
	}
	half, err := os.MkdirTemp(filepath.Dir(root), ".half-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(half) }() // the folder has been renamed if all steps succeeded
	if err := os.CopyFS(half, os.DirFS(module.Dir)); err != nil {
		return err
	}
	if err := useDebiansLibraries(filepath.Join(half, "targets/wasip1.json")); err != nil {
		return err
	}
	// TinyGo's package net is a submodule too. The folder must exist; plugins do not import the package.
	if err := os.Mkdir(filepath.Join(half, "src/net"), 0o755); err != nil {
		return err
	}
	compile := exec.Command("go", "build", "-tags", "llvm19", "-trimpath", "-buildvcs=false", "-o", "bin/tinygo", ".")
	compile.Dir = half
	if out, err := compile.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	start := fmt.Sprintf("#!/bin/sh\nGOTOOLCHAIN=%s exec '%s/bin/tinygo' \"$@\"\n", toolchain, root)
	if err := os.WriteFile(filepath.Join(half, "tinygo"), []byte(start), 0o755); err != nil {
		return err
	}
	return os.Rename(half, root)
}

// useDebiansLibraries changes a target of TinyGo: TinyGo would compile the C library and the
// compiler's builtins from their sources, which are absent.
func useDebiansLibraries(target string) error {
	text, err := os.ReadFile(target)
	if err != nil {
		return err
	}
	var keys map[string]any
	if err := json.Unmarshal(text, &keys); err != nil {
		return err
	}
	delete(keys, "libc")
	delete(keys, "rtlib")
	for key, flags := range map[string][]any{
		"cflags":  {"-isystem", wasiHeaders},
		"ldflags": {wasiLibrary, wasmBuiltins},
	} {
		have, _ := keys[key].([]any)
		keys[key] = append(have, flags...)
	}
	if text, err = json.Marshal(keys); err != nil {
		return err
	}
	return os.WriteFile(target, text, 0o644)
}

// TestTinyGo builds the filter of TestSDK with TinyGo, over each SDK.
func TestTinyGo(t *testing.T) {
	for sdk := range sdks {
		t.Run(sdk, func(t *testing.T) {
			module, result := buildPluginWith(t, build.Options{Dir: tour(t, sdk), TinyGo: true})
			if !strings.HasPrefix(result.Toolchain, "tinygo 0.") {
				t.Errorf("built with %s", result.Toolchain)
			}
			checkSDK(t, module)
		})
	}
}
