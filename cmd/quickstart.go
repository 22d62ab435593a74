package cmd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/quickstart"
)

// quickstartCommand has one subcommand for each quickstart, so that help, completion and
// suggestions contain their names.
func (a *app) quickstartCommand() *cobra.Command {
	o := quickstart.Defaults()
	o.Proxy, _, _ = strings.Cut(Version, "-") // a development version has no image
	var out string
	var force bool
	c := &cobra.Command{
		Use:   "quickstart",
		Short: "Print the commands and files of a first deployment with real engines",
		Long: "Print the start command and the environment of each engine, the files that the engines read, and the\n" +
			"configuration of the proxy. Without a name, list the quickstarts.",
		Example: "  pdproxy quickstart vllm-nixl\n" +
			"  pdproxy quickstart sglang --prefill 2 --decode 2 --host 10.0.0.5,10.0.0.6 --model Qwen/Qwen3-32B --tp 4 --out deployment",
		RunE: func(c *cobra.Command, _ []string) error { return a.listQuickstarts(c) },
	}
	f := c.PersistentFlags()
	f.IntVar(&o.Prefill, "prefill", o.Prefill, "number of prefill engines")
	f.IntVar(&o.Decode, "decode", o.Decode, "number of decode engines")
	f.IntVar(&o.Encode, "encode", o.Encode, "number of vLLM encoders for images and sounds")
	f.IntVar(&o.TP, "tp", o.TP, "GPUs of each engine (tensor-parallel size)")
	f.StringSliceVar(&o.Hosts, "host", o.Hosts, "IPv4 addresses of the engines' hosts, separated by commas")
	f.StringVar(&o.Model, "model", "", "name or path of the model; default a small model")
	f.StringVar(&out, "out", "", "write config.toml, one script for each process, docker-compose.yaml and kubernetes.yaml into this new or empty folder")
	f.BoolVar(&force, "force", false, "with --out: overwrite these files in a folder that is not empty")
	_ = c.MarkPersistentFlagDirname("out") // the flag exists
	for _, s := range quickstart.List() {
		c.AddCommand(&cobra.Command{
			Use:     s.Name,
			Short:   s.Title,
			Example: fmt.Sprintf("  pdproxy quickstart %s --out deployment", s.Name),
			Args:    cobra.NoArgs,
			RunE: func(*cobra.Command, []string) error {
				plan, err := quickstart.Make(s.Name, o)
				if err != nil {
					return fmt.Errorf("quickstart: %w", err)
				}
				return a.printQuickstart(plan, out, force)
			},
		})
	}
	for _, printer := range append(c.Commands(), c) {
		a.addJSON(printer)
	}
	return c
}

// listQuickstarts lists the quickstarts. A flag of a quickstart needs the name of one.
func (a *app) listQuickstarts(c *cobra.Command) error {
	var flags []string
	c.Flags().Visit(func(f *pflag.Flag) {
		if c.PersistentFlags().Lookup(f.Name) != nil {
			flags = append(flags, "--"+f.Name)
		}
	})
	if len(flags) > 0 {
		var names []string
		for _, s := range quickstart.List() {
			names = append(names, s.Name)
		}
		return fmt.Errorf("quickstart: which quickstart do you mean with %s? Name one of %s", strings.Join(flags, " "), strings.Join(names, ", "))
	}
	if a.json {
		return exit.Failed(a.printJSON(quickstart.List()))
	}
	w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
	for _, s := range quickstart.List() {
		fmt.Fprintf(w, "%s\t%s\n", s.Name, s.Title)
	}
	return exit.Failed(w.Flush())
}

// printQuickstart prints a plan, or writes its files into the folder out.
func (a *app) printQuickstart(plan *quickstart.Plan, out string, force bool) error {
	if out == "" {
		if a.json {
			return exit.Failed(a.printJSON(plan))
		}
		_, err := fmt.Fprint(a.out, plan.Text())
		return exit.Failed(err)
	}
	if entries, err := os.ReadDir(out); err == nil && len(entries) > 0 && !force {
		return fmt.Errorf("--out: the folder %s is not empty; --force overwrites its files", out)
	} else if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("--out: %w", err)
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	for _, f := range plan.Output() {
		mode := os.FileMode(0o644)
		if strings.HasSuffix(f.Name, ".sh") {
			mode = 0o755
		}
		path := filepath.Join(out, f.Name)
		if err := os.WriteFile(path, []byte(f.Text), mode); err != nil {
			return exit.Failed(err)
		}
		if !a.json {
			fmt.Fprintln(a.out, path)
		}
	}
	if a.json {
		return exit.Failed(a.printJSON(plan))
	}
	file := filepath.Join(out, "config.toml")
	_, err := fmt.Fprintf(a.err, "\nNext: run each script on the host that its first lines name, then:\n  %[1]s check %[2]s\n  %[1]s run %[2]s\nOr start the same processes in containers:\n  docker compose -f %[3]s up\n  kubectl apply -f %[4]s\nThe same command without --out also prints the installation and a smoke test.\n", programName(), file,
		filepath.Join(out, "docker-compose.yaml"), filepath.Join(out, "kubernetes.yaml"))
	return exit.Failed(err)
}
