package cmd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/plugins/build"
)

// pluginCommand holds the tools of plugin authors. None of them needs a proxy.
func (a *app) pluginCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "plugin",
		Short: "Create, build, inspect and test plugins",
		Example: `  pdproxy plugin new my-router
  pdproxy plugin build my-router
  pdproxy plugin test my-router/my-router.wasm my-router/frames.json`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return errors.Join(c.Usage(), errNoSubcommand) },
	}
	c.AddCommand(a.pluginNewCommand(), a.pluginBuildCommand(), a.pluginInspectCommand(), a.pluginTestCommand())
	return c
}

var errNoSubcommand = errors.New("plugin: one of new, build, inspect and test")

func (a *app) pluginBuildCommand() *cobra.Command {
	var o build.Options
	c := &cobra.Command{
		Use:   "build DIR",
		Short: "Compile a plugin written in Go to WebAssembly",
		Long: `Compile the package main in DIR to a WebAssembly module, with the go command.

The plugin may use github.com/tetratelabs/proxy-wasm-go-sdk,
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
	c.Flags().BoolVar(&o.TinyGo, "tinygo", false, "compile with TinyGo instead of Go")
	return a.addJSON(c)
}

func (a *app) pluginBuild(o build.Options) error {
	if err := isFolder(o.Dir); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	r, err := build.Build(ctx, o)
	if err != nil {
		return exit.Failed(fmt.Errorf("build %s: %w", o.Dir, err))
	}
	if a.json {
		return exit.Failed(a.printJSON(r))
	}
	sdk := "no SDK that is known"
	if r.SDK != "" {
		sdk = r.SDK
		if r.Version != "" {
			sdk += " " + r.Version
		}
	}
	fmt.Fprintf(a.out, "%s: %.1f MB, %s, %s\n", r.Output, float64(r.SizeBytes)/1e6, r.Toolchain, sdk)
	return nil
}

// isFolder returns an error of usage when DIR is not a folder.
func isFolder(dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%s is not a folder", dir)
	}
	return nil
}

func (a *app) pluginNewCommand() *cobra.Command {
	var kind, sdk string
	c := &cobra.Command{
		Use:   "new NAME",
		Short: "Create a plugin: a folder with source, test frames and a README",
		Long: `Create the folder NAME with a plugin that builds and runs without changes.

The build needs only Go. With --sdk-dir the policy uses the package abi/guest of
pdproxy's sources: it is shorter, and "go test" can test it.`,
		Example: `  pdproxy plugin new my-router
  pdproxy plugin new --kind filter my-filter`,
		Args: arguments("NAME"),
		RunE: func(_ *cobra.Command, args []string) error { return a.pluginNew(args[0], build.Kind(kind), sdk) },
	}
	c.Flags().StringVar(&kind, "kind", string(build.Policy), "policy or filter")
	c.Flags().StringVar(&sdk, "sdk-dir", "", "folder with pdproxy's sources, for a policy that uses abi/guest")
	return a.addJSON(c)
}

func (a *app) pluginNew(dir string, kind build.Kind, sdk string) error {
	files, err := build.New(dir, kind, sdk)
	if err != nil {
		return fmt.Errorf("new plugin: %w", err)
	}
	if a.json {
		return exit.Failed(a.printJSON(struct {
			Dir   string   `json:"dir"`
			Files []string `json:"files"`
		}{dir, files}))
	}
	name := filepath.Base(dir)
	fmt.Fprintf(a.out, "%s: %s\n\npdproxy plugin build %s\npdproxy plugin test %s %s\n", dir, strings.Join(files, ", "), dir,
		filepath.Join(dir, name+".wasm"), filepath.Join(dir, "frames.json"))
	return nil
}
