package build

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// rustTarget is the target of plugins in Rust. Its modules import only what the
// plugin itself imports.
const rustTarget = "wasm32-unknown-unknown"

// prepareRust finds cargo, rustc and the target.
func prepareRust(ctx context.Context, dir string, log io.Writer) (*job, error) {
	cargo, err := exec.LookPath("cargo")
	if err != nil {
		return nil, ErrNoRust
	}
	rustc, err := exec.LookPath("rustc")
	if err != nil {
		return nil, ErrNoRust
	}
	libraries, err := firstLine(ctx, dir, rustc, "--print", "target-libdir", "--target", rustTarget)
	if err == nil {
		_, err = os.Stat(libraries)
	}
	if err != nil {
		return nil, ErrNoTarget
	}
	version, err := firstLine(ctx, dir, rustc, "--version")
	if err != nil {
		return nil, ErrNoRust
	}
	version, _, _ = strings.Cut(version, " (")
	compile := func(ctx context.Context, work, output string) error {
		cmd := exec.CommandContext(ctx, cargo, "build", "--quiet", "--release", "--target", rustTarget, "--target-dir", work)
		cmd.Dir, cmd.Stdout, cmd.Stderr = dir, log, log
		if err := run(cmd); err != nil {
			return err
		}
		modules, err := filepath.Glob(filepath.Join(work, rustTarget, "release", "*.wasm"))
		if err != nil || len(modules) != 1 {
			return errors.New(`the crate makes no module, or several: Cargo.toml needs one library with crate-type = ["cdylib"]`)
		}
		module, err := os.ReadFile(modules[0])
		if err != nil {
			return err
		}
		return os.WriteFile(output, module, 0o644)
	}
	return &job{Result{Toolchain: version}, compile}, nil
}

// prepareC finds clang and its linker for WebAssembly. All *.c files of the folder
// are one plugin.
func prepareC(ctx context.Context, dir string, sources []string, log io.Writer) (*job, error) {
	clang, err := exec.LookPath("clang")
	if err != nil {
		return nil, ErrNoClang
	}
	linker, err := firstLine(ctx, dir, clang, "--target=wasm32", "--print-prog-name=wasm-ld")
	if err == nil {
		_, err = exec.LookPath(linker)
	}
	if err != nil {
		return nil, ErrNoLinker
	}
	version, err := firstLine(ctx, dir, clang, "-dumpversion")
	if err != nil {
		return nil, ErrNoClang
	}
	compile := func(ctx context.Context, _, output string) error {
		// Without -fno-builtin clang replaces loops by calls of a C library.
		args := []string{"--target=wasm32", "-O2", "-Wall", "-ffreestanding", "-fno-builtin", "-nostdlib", "-Wl,--no-entry", "-Wl,--strip-all", "-o", output}
		cmd := exec.CommandContext(ctx, clang, append(args, sources...)...)
		cmd.Dir, cmd.Stdout, cmd.Stderr = dir, log, log
		return run(cmd)
	}
	return &job{Result{Toolchain: "clang " + version}, compile}, nil
}

// firstLine runs a compiler that prints a fact about itself.
func firstLine(ctx context.Context, dir, path string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir = dir // rustup chooses the toolchain by the folder
	out, err := cmd.Output()
	line, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimSpace(line), err
}
