// Package build compiles plugins written in Go, Rust or C to WebAssembly modules,
// and writes the first files of new ones. It does not change a plugin's sources. For
// Go an overlay gives the compiler the files that have to differ (the host calls of
// an SDK written for TinyGo).
//
// The decisions behind this package are in docs/design/plugins.md.
package build

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// Options are the options of Build.
type Options struct {
	Dir    string    // folder of the plugin's source: a package main, a crate, or files in C
	Output string    // path of the module; "" = Dir/<folder name>.wasm
	TinyGo bool      // compile with TinyGo instead of Go
	Log    io.Writer // receives the output of the compilers
}

// Result describes the module that Build made.
type Result struct {
	Output    string `json:"output"`
	SDK       string `json:"sdk"`       // import path of the SDK's module, "" for an unknown SDK
	Version   string `json:"version"`   // the SDK's version, "" for a folder
	Toolchain string `json:"toolchain"` // "go1.26.8", "tinygo 0.41.0", "rustc 1.90.0", "clang 14.0.6"
	SizeBytes int64  `json:"size_bytes"`
}

// ErrNoPlugin reports that the folder has no source of a plugin.
var ErrNoPlugin = errors.New("the folder has no plugin: *.go with a go.mod, Cargo.toml, or *.c (pdproxy plugin new makes one)")

// The errors of missing compilers contain the command that installs the compiler.
var (
	ErrNoGo     = errors.New("no Go toolchain: put go 1.24 or later into PATH (https://go.dev/dl)")
	ErrNoTinyGo = errors.New("no TinyGo: put tinygo into PATH (https://tinygo.org/getting-started/install), or build without --tinygo")
	ErrNoRust   = errors.New("no Rust toolchain: put cargo and rustc into PATH (https://rustup.rs)")
	ErrNoTarget = errors.New("no target wasm32-unknown-unknown in Rust: run rustup target add wasm32-unknown-unknown (Debian: apt install libstd-rust-dev-wasm32)")
	ErrNoClang  = errors.New("no clang: install clang and lld (Debian: apt install clang lld; macOS: brew install llvm lld)")
	ErrNoLinker = errors.New("clang finds no wasm-ld: install lld (Debian: apt install lld; macOS: brew install lld)")
)

// ErrLoad reports that the folder is not a Go package whose imports can all be found. The error
// gives the reason.
var ErrLoad = errors.New("the plugin cannot be loaded")

// ErrCompile reports that the compiler rejected the plugin. Options.Log has the
// reasons.
var ErrCompile = errors.New("the plugin does not compile")

// Build compiles the plugin in o.Dir. The module gets its name only when it is
// complete, so a proxy that watches the file never reads half of it.
func Build(ctx context.Context, o Options) (Result, error) {
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return Result{}, err
	}
	output := o.Output
	if output == "" {
		output = filepath.Join(dir, filepath.Base(dir)+".wasm")
	}
	if output, err = filepath.Abs(output); err != nil {
		return Result{}, err
	}
	j, err := prepare(ctx, dir, o)
	if err != nil {
		return Result{}, err
	}
	work, err := os.MkdirTemp("", "pdproxy-build-")
	if err != nil {
		return Result{}, err
	}
	defer func() { _ = os.RemoveAll(work) }()

	// In the folder of the output, so that the rename stays within one file
	// system.
	half, err := os.CreateTemp(filepath.Dir(output), "."+filepath.Base(output)+".*")
	if err != nil {
		return Result{}, fmt.Errorf("create module: %w", err)
	}
	half.Close()
	defer func() { _ = os.Remove(half.Name()) }() // the file has been renamed if all steps succeeded

	if err := j.compile(ctx, work, half.Name()); err != nil {
		return Result{}, err
	}
	r := j.result
	r.Output = output
	if r.SizeBytes, err = checkModule(half.Name()); err != nil {
		return Result{}, err
	}
	if err := os.Chmod(half.Name(), 0o644); err != nil {
		return Result{}, err
	}
	return r, os.Rename(half.Name(), output)
}

// job is a build whose sources and compilers were found. compile may use the folder
// work, and writes the module to output.
type job struct {
	result  Result // without the output and its size
	compile func(ctx context.Context, work, output string) error
}

// prepare finds out the language of the plugin in dir, and its compiler.
func prepare(ctx context.Context, dir string, o Options) (*job, error) {
	if info, err := os.Stat(dir); err != nil {
		return nil, err
	} else if !info.IsDir() {
		return nil, fmt.Errorf("%s is not a folder", dir)
	}
	if sources, err := filepath.Glob(filepath.Join(dir, "*.go")); err != nil || len(sources) > 0 {
		return prepareGo(ctx, dir, o)
	}
	var prepared *job
	_, err := os.Stat(filepath.Join(dir, "Cargo.toml"))
	if err == nil {
		prepared, err = prepareRust(ctx, dir, o.Log)
	} else if sources, _ := filepath.Glob(filepath.Join(dir, "*.c")); len(sources) > 0 {
		prepared, err = prepareC(ctx, dir, sources, o.Log)
	} else {
		return nil, ErrNoPlugin
	}
	if o.TinyGo {
		return nil, errors.New("--tinygo is for plugins in Go")
	}
	return prepared, err
}

func prepareGo(ctx context.Context, dir string, o Options) (*job, error) {
	tool, err := findToolchain(ctx, dir, o.Log)
	if err != nil {
		return nil, err
	}
	plugin, err := tool.load(ctx)
	if err != nil {
		return nil, err
	}
	r := Result{SDK: plugin.sdk.Path, Version: plugin.sdk.version(), Toolchain: tool.version}
	if o.TinyGo {
		path, err := exec.LookPath("tinygo")
		if err != nil {
			return nil, ErrNoTinyGo
		}
		version, err := tinyGoVersion(ctx, dir, path)
		if err != nil {
			return nil, err
		}
		r.Toolchain = "tinygo " + version
		return &job{r, func(ctx context.Context, _, output string) error {
			return tool.compileTinyGo(ctx, path, plugin, output)
		}}, nil
	}
	return &job{r, func(ctx context.Context, work, output string) error { return tool.compile(ctx, plugin, work, output) }}, nil
}

// checkModule rejects a module that no host would load, and returns the file's
// size.
func checkModule(path string) (int64, error) {
	module, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	names, err := exports(module)
	if err != nil {
		return 0, err
	}
	for _, name := range names {
		if strings.HasPrefix(name, "proxy_abi_version_") || strings.HasPrefix(name, "pdproxy_v1_on_") {
			return int64(len(module)), nil
		}
	}
	return 0, errors.New("the module exports neither a marker (proxy_abi_version_...) nor a hook (pdproxy_v1_on_...), so no host would load it: it imports no SDK that exports them, and exports none itself")
}

// compile runs go build. An SDK for TinyGo gets its host calls and callbacks in
// the form that Go's compiler understands.
func (t *toolchain) compile(ctx context.Context, p *plugin, work, output string) error {
	args := []string{"build", "-trimpath", "-buildvcs=false", "-buildmode=c-shared", "-o", output}
	if p.tiny != nil {
		o, err := t.overlayFor(ctx, p, work)
		if err != nil {
			return err
		}
		file := filepath.Join(work, "overlay.json")
		text, err := json.Marshal(map[string]any{"Replace": o.replace})
		if err != nil {
			return err
		}
		if err := os.WriteFile(file, text, 0o600); err != nil {
			return err
		}
		args = append(args, "-overlay", file)
		args = append(args, o.flags...)
	}
	return run(t.command(ctx, nil, append(args, ".")...))
}

// oldestTinyGo is the oldest TinyGo 0.x that make test-authors can build and test.
const oldestTinyGo = 37

// tinyGoVersion returns the version of the compiler, which prints
// "tinygo version 0.37.0 linux/amd64 (using go version go1.24.0 and LLVM version 19.1.7)". The
// error of an old compiler is one line.
func tinyGoVersion(ctx context.Context, dir, path string) (string, error) {
	line, err := firstLine(ctx, dir, path, "version")
	if err != nil {
		return "", fmt.Errorf("tinygo version: %w", err)
	}
	rest, ok := strings.CutPrefix(line, "tinygo version ")
	if !ok {
		return "", fmt.Errorf("tinygo version: unknown answer %q", line)
	}
	version, _, _ := strings.Cut(rest, " ")
	if digits, ok := strings.CutPrefix(version, "0."); ok {
		digits, _, _ = strings.Cut(digits, ".")
		if minor, err := strconv.Atoi(digits); err == nil && minor < oldestTinyGo {
			return "", fmt.Errorf("tinygo %s is too old: plugins need TinyGo 0.%d or later", version, oldestTinyGo)
		}
	}
	return version, nil
}

// compileTinyGo runs tinygo build. Plugins written before reactors register
// themselves in main. If main does something, the plugin is built as a command,
// whose _start runs main. With TinyGo's default scheduler each call of an export
// starts a goroutine with a stack of 64 KiB: a call then takes 100 times as long,
// and milliseconds when the collector runs.
func (t *toolchain) compileTinyGo(ctx context.Context, path string, p *plugin, output string) error {
	args := []string{"build", "-target=wasip1", "-scheduler=none", "-o", output}
	works, err := p.mainDoesWork()
	if err != nil {
		return err
	}
	if !works {
		args = append(args, "-buildmode=c-shared")
	}
	cmd := exec.CommandContext(ctx, path, append(args, ".")...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = t.dir, t.log, t.log
	return run(cmd)
}

// run runs a compiler.
func run(cmd *exec.Cmd) error {
	err := cmd.Run()
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		return fmt.Errorf("%w (%s %s: %w)", ErrCompile, filepath.Base(cmd.Path), cmd.Args[1], err)
	}
	return err
}
