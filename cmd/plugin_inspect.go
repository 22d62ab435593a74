package cmd

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
)

func (a *app) pluginInspectCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "inspect FILE",
		Short: "Show what a module is: ABI, hooks, callbacks, imports, needs, size, start",
		Args:  cobra.ExactArgs(1),
		RunE:  func(_ *cobra.Command, args []string) error { return a.pluginInspect(args[0]) },
	}
}

// inspection is what a module says of itself when it is loaded and started once.
type inspection struct {
	ABI       string   `json:"abi"`      // version of proxy-wasm, "" for a module that only has hooks
	Hooks     []string `json:"hooks"`    // exports that are called
	Policies  []string `json:"policies"` // "hook name" each; empty when hooks are not named
	Callbacks []string `json:"callbacks"`
	Imports   []string `json:"imports"`
	Needs     []string `json:"needs"`
	SizeBytes int      `json:"size_bytes"`
	// The first run on a machine without anything in its caches.
	CompileMS     float64 `json:"compile_ms"`
	InstantiateUS float64 `json:"instantiate_us"`
	MemoryBytes   uint32  `json:"memory_bytes"` // of one instance after its start
}

func (a *app) pluginInspect(path string) error {
	wasm, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	i, err := a.inspect(context.Background(), wasm)
	if err != nil {
		return failed(fmt.Errorf("inspect %s: %w", path, err))
	}
	if a.json {
		return failed(a.printJSON(i))
	}
	w := tabwriter.NewWriter(a.out, 0, 4, 2, ' ', 0)
	list := func(name string, values []string) {
		if len(values) == 0 {
			values = []string{"none"}
		}
		fmt.Fprintf(w, "%s\t%s\n", name, strings.Join(values, "\n\t"))
	}
	list("abi", strings.Fields(i.ABI))
	list("hooks", i.Hooks)
	list("policies", i.Policies)
	list("needs", i.Needs)
	list("callbacks", i.Callbacks)
	list("imports", i.Imports)
	fmt.Fprintf(w, "size\t%.1f kB, %.1f MiB of memory when started\n", float64(i.SizeBytes)/1e3, float64(i.MemoryBytes)/(1<<20))
	fmt.Fprintf(w, "compile\t%.0f ms\n", i.CompileMS)
	fmt.Fprintf(w, "instantiate\t%.0f µs\n", i.InstantiateUS)
	return failed(w.Flush())
}

func (a *app) inspect(ctx context.Context, wasm []byte) (*inspection, error) {
	module, err := host.Load(ctx, wasm, host.LoadOptions{Guarded: true, CompileWorkers: 2})
	if err != nil {
		return nil, err
	}
	defer module.Close(ctx)
	ctx, cancel := context.WithTimeout(ctx, trialStart)
	defer cancel()
	began := time.Now()
	vm, err := module.NewVM(ctx, newTrialWorld(a.err, host.LogInfo, ""))
	if err != nil {
		return nil, err
	}
	defer vm.Close(ctx)
	info, started := module.Info(), time.Since(began)
	i := &inspection{
		ABI:           info.ABIVersion,
		Hooks:         append([]string{}, info.Hooks...),
		Policies:      []string{},
		Callbacks:     append([]string{}, info.Callbacks...),
		Imports:       append([]string{}, info.Imports...),
		SizeBytes:     info.SizeBytes,
		CompileMS:     float64(info.CompileTime.Microseconds()) / 1000,
		InstantiateUS: float64(started.Nanoseconds()) / 1000,
		MemoryBytes:   vm.MemorySize(),
	}
	needs, _, err := vm.Value(ctx, abi.ExportNeeds)
	if err != nil {
		return nil, err
	}
	i.Needs = append([]string{}, abi.Needs(needs).Names()...)
	names, named, err := vm.Text(ctx, abi.ExportPolicies)
	if err != nil || !named {
		return i, err
	}
	for line := range strings.Lines(names) {
		if line = strings.TrimSpace(line); line != "" {
			i.Policies = append(i.Policies, line)
		}
	}
	// An SDK exports all hooks: those without a policy are not called.
	i.Hooks = slices.DeleteFunc(i.Hooks, func(export string) bool {
		return !slices.ContainsFunc(i.Policies, func(line string) bool {
			word, _, _ := strings.Cut(line, " ")
			hook, ok := abi.ParseHook(word)
			return ok && hook.Export() == export
		})
	})
	return i, nil
}
