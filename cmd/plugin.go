package cmd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/plugins/build"
)

// pluginCommand holds the tools of plugin authors. None of them needs a proxy.
func (a *app) pluginCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "plugin",
		Short: "Create, build, inspect, test and push plugins",
		Example: `  pdproxy plugin new my-router
  pdproxy plugin build my-router
  pdproxy plugin test my-router/my-router.wasm my-router/frames.json`,
		RunE: func(c *cobra.Command, _ []string) error { return errors.Join(c.Usage(), errNoSubcommand) },
	}
	c.AddCommand(a.pluginNewCommand(), a.pluginBuildCommand(), a.pluginInspectCommand(), a.pluginTestCommand(), a.pluginPushCommand())
	return c
}

var errNoSubcommand = errors.New("plugin: one of new, build, inspect, test and push")

func (a *app) pluginBuildCommand() *cobra.Command {
	var o build.Options
	c := &cobra.Command{
		Use:   "build DIR",
		Short: "Compile a plugin in Go, Rust or C to WebAssembly",
		Long: `Compile the source in DIR to a WebAssembly module: a package main with the go
command, a crate (Cargo.toml) with cargo, or *.c with clang.

A plugin in Go may use github.com/tetratelabs/proxy-wasm-go-sdk,
github.com/proxy-wasm/proxy-wasm-go-sdk, pdproxy's abi/guest, or no SDK. The
source needs no change, and the command does not change its folder.`,
		Example: `  pdproxy plugin build my-router
  pdproxy plugin build my-router -o dist/my-router.wasm`,
		Args: arguments("DIR"),
		RunE: func(_ *cobra.Command, args []string) error {
			o.Dir, o.Log = args[0], a.err
			return a.pluginBuild(o)
		},
	}
	c.Flags().StringVarP(&o.Output, "output", "o", "", "path of the module (default DIR/<folder name>.wasm)")
	completeFile(c, "wasm", "output")
	c.Flags().BoolVar(&o.TinyGo, "tinygo", false, "compile with TinyGo instead of Go")
	return a.addJSON(c)
}

func (a *app) pluginBuild(o build.Options) error {
	if err := isFolder(o.Dir); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if !a.json {
		fmt.Fprintf(a.err, "compiling %s; the first build of a language takes longer\n", o.Dir)
	}
	r, err := build.Build(ctx, o)
	if err != nil {
		return exit.Failed(fmt.Errorf("build %s: %w", o.Dir, err))
	}
	if a.json {
		return exit.Failed(a.printJSON(r))
	}
	sdk := "none"
	if r.SDK != "" {
		sdk = r.SDK
		if r.Version != "" {
			sdk += " " + r.Version
		}
	}
	fmt.Fprintf(a.out, "%s: %.1f kB, compiler %s, SDK %s\n", r.Output, float64(r.SizeBytes)/1e3, r.Toolchain, sdk)
	return nil
}

// isFolder returns an error of usage when DIR is not a folder.
func isFolder(dir string) error {
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("there is no folder %s: pdproxy plugin new %s makes one with a plugin", dir, dir)
	case err != nil:
		return err
	case !info.IsDir():
		return fmt.Errorf("%s is not a folder", dir)
	}
	return nil
}

func (a *app) pluginNewCommand() *cobra.Command {
	var o build.NewOptions
	c := &cobra.Command{
		Use:   "new NAME",
		Short: "Create a plugin: a folder with source, test frames and a README",
		Long: `Create the folder NAME with a plugin that builds and runs without changes.

The folder contains all files that the build needs: for a policy in Go the
packages abi and abi/guest, for Rust and C a file with the structures of the
contract. So the build needs a compiler and no network. Only the SDKs of --sdk come
from a registry.`,
		Example: `  pdproxy plugin new my-router
  pdproxy plugin new --kind plan --lang rust short
  pdproxy plugin new --kind filter --sdk stamp`,
		Args: arguments("NAME"),
		RunE: func(_ *cobra.Command, args []string) error {
			o.Dir = args[0]
			return a.pluginNew(o)
		},
	}
	c.Flags().StringVar((*string)(&o.Kind), "kind", string(build.Place), "kind of the plugin: %s; policy means place, and all but filter are policies")
	c.Flags().StringVar((*string)(&o.Language), "lang", string(build.Go), "language of the source: %s")
	c.Flags().BoolVar(&o.Registry, "sdk", false, "for a filter in Go or Rust: use the SDK of the proxy-wasm project, which the first build downloads")
	c.Flags().StringVar(&o.SDKDir, "sdk-dir", "", "folder with pdproxy's sources, for a policy in Go that uses them instead of a copy")
	chooseOf(c, "kind", append(texts(build.Kinds), string(build.Policy))...)
	chooseOf(c, "lang", texts(build.Languages)...)
	_ = c.MarkFlagDirname("sdk-dir") // the flag exists
	return a.addJSON(c)
}

// texts returns named texts as plain ones.
func texts[T ~string](list []T) (plain []string) {
	for _, text := range list {
		plain = append(plain, string(text))
	}
	return plain
}

func (a *app) pluginNew(o build.NewOptions) error {
	files, err := build.New(o)
	if err != nil {
		return fmt.Errorf("new plugin: %w", err)
	}
	if a.json {
		return exit.Failed(a.printJSON(struct {
			Dir   string   `json:"dir"`
			Files []string `json:"files"`
		}{o.Dir, files}))
	}
	flag := ""
	if o.Language == build.TinyGo {
		flag = "--tinygo "
	}
	module := filepath.Join(o.Dir, filepath.Base(o.Dir)+".wasm")
	// The copied packages are one entry, so that the plugin's own files are visible.
	files = slices.DeleteFunc(files, func(name string) bool { return strings.HasPrefix(name, "pdproxy/") && name != "pdproxy/go.mod" })
	list := strings.Replace(strings.Join(files, ", "), "pdproxy/go.mod", "pdproxy/", 1)
	fmt.Fprintf(a.out, "Created %s: %s\n\nNext, build the plugin and test it (%s has the details, and the configuration of the proxy):\n  %s plugin build %s%s\n  %s plugin test %s %s\n", o.Dir, list, filepath.Join(o.Dir, "README.md"), programName(), flag, o.Dir,
		programName(), module, filepath.Join(o.Dir, "frames.json"))
	return nil
}
