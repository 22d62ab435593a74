package cmd

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/plugins/trial"
)

func (a *app) pluginInspectCommand() *cobra.Command {
	return a.addJSON(&cobra.Command{
		Use:   "inspect FILE.wasm",
		Short: "Show contract, hooks, policies, callbacks, imports, needs, declared headers, size and start time of a module",
		Example: `  pdproxy plugin inspect my-router/my-router.wasm
  pdproxy plugin inspect --json my-router/my-router.wasm`,
		Args: arguments("FILE.wasm"),
		RunE: func(_ *cobra.Command, args []string) error { return a.pluginInspect(args[0]) },
	})
}

func (a *app) pluginInspect(path string) error {
	wasm, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	i, err := trial.Inspect(context.Background(), wasm, a.guestLog(host.LogInfo))
	if err != nil {
		return exit.Failed(fmt.Errorf("inspect %s: %w", path, err))
	}
	if a.json {
		return exit.Failed(a.printJSON(i))
	}
	w := tabwriter.NewWriter(a.out, 0, 4, 2, ' ', 0)
	list := func(name string, values []string) {
		if len(values) == 0 {
			values = []string{"none"}
		}
		fmt.Fprintf(w, "%s\t%s\n", name, strings.Join(values, "\n\t"))
	}
	contract, abi := "none: not a policy", "none: not a filter"
	if i.Contract > 0 {
		contract = strconv.Itoa(i.Contract)
	}
	if i.ABI != "" {
		abi = i.ABI
	}
	fmt.Fprintf(w, "contract\t%s\nproxy-wasm\t%s\n", contract, abi)
	list("hooks", i.Hooks)
	if len(i.Hooks) > 0 && len(i.Policies) == 0 {
		fmt.Fprintln(w, "policies\tone for each hook, with the name of the plugin")
	} else {
		list("policies", i.Policies)
	}
	list("needs", i.Needs)
	list("headers", i.Headers)
	list("callbacks", i.Callbacks)
	list("imports", i.Imports)
	fmt.Fprintf(w, "size\t%.1f kB, %.1f MiB of memory when started\n", float64(i.SizeBytes)/1e3, float64(i.MemoryBytes)/(1<<20))
	fmt.Fprintf(w, "compile\t%.0f ms\n", i.CompileMS)
	fmt.Fprintf(w, "instantiate\t%.0f µs\n", i.InstantiateUS)
	return exit.Failed(w.Flush())
}
