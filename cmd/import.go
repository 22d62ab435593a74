package cmd

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/config/importer"
)

func (a *app) importCommand() *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use:   "import",
		Short: "Convert the configuration of another router",
		Long: "Print a config.toml that does the same as the configuration of another router. A comment names each\n" +
			"setting without an equivalent, with its line. Warnings go to standard error. The output contains no secrets.\n" +
			"A setting that changes what a request does (prefill and decode, retries, limits, keys, models) and that has\n" +
			"no equivalent is an error, unless --force is given.",
		Example: "  pdproxy import vllm-router start-router.sh > config.toml\n  pdproxy import llm-d epp-config.yaml > config.toml",
		Args:    cobra.NoArgs,
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	llmd := a.importFile("llm-d", "values.yaml", "Convert an EndpointPickerConfig, Helm values, or the flags or the configuration of pd-sidecar of llm-d", importer.LLMD, &force)
	llmd.Aliases = []string{"llmd"}
	c.PersistentFlags().BoolVar(&force, "force", false, "leave out settings that change what a request does and have no equivalent")
	c.AddCommand(a.importTRTLLM(&force),
		a.importFlags("vllm-router", "of vllm-router", importer.VLLMRouter, &force),
		a.importFlags("sglang-router", "of SGLang's model gateway (sglang-router, smg)", importer.SGLangRouter, &force),
		a.importFile("production-stack", "values.yaml", "Convert the flags or the Helm values of vLLM's production stack", importer.ProductionStack, &force),
		llmd,
		a.importFile("dynamo", "graph.yaml", "Convert the flags of Dynamo's frontend or a DynamoGraphDeployment", importer.Dynamo, &force),
		a.importFile("litellm", "config.yaml", "Convert the config.yaml of LiteLLM's proxy", importer.LiteLLM, &force))
	return c
}

func (a *app) importTRTLLM(force *bool) *cobra.Command {
	var metadata string
	timeout := int(importer.DefaultRequestTimeout / time.Second)
	c := &cobra.Command{
		Use:   "trtllm disagg_config.yaml [metadata_config.yaml]",
		Short: "Convert the files of trtllm-serve disaggregated",
		Example: `  pdproxy import trtllm disagg_config.yaml > config.toml
  pdproxy import trtllm disagg_config.yaml -m metadata_config.yaml`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 2 {
				return nil
			}
			return arguments("disagg_config.yaml")(c, args)
		},
		RunE: func(_ *cobra.Command, args []string) error {
			if len(args) == 2 && metadata != "" {
				return errors.New("import: the metadata server's file is named twice")
			}
			if len(args) == 2 {
				metadata = args[1]
			}
			if timeout < 1 || timeout > 1_000_000_000 {
				return errors.New("--request-timeout: want seconds, at least 1")
			}
			in := importer.TRTLLM{RequestTimeout: time.Duration(timeout) * time.Second}
			var err error
			if in.Disagg, err = readImport(args[0]); err != nil {
				return err
			}
			if metadata != "" {
				if in.Metadata, err = readImport(metadata); err != nil {
					return err
				}
			}
			return a.printImport(*force)(in.Import())
		},
	}
	c.Flags().StringVarP(&metadata, "metadata-server-config-file", "m", "", "file of the metadata server, as for trtllm-serve")
	c.Flags().IntVarP(&timeout, "request-timeout", "r", timeout, "--request_timeout of trtllm-serve, in seconds")
	return a.addJSON(c)
}

func (a *app) importFlags(name, of string, read func(importer.File) (importer.Result, error), force *bool) *cobra.Command {
	return a.addJSON(&cobra.Command{
		Use:   name + " FLAGFILE",
		Short: "Convert the flags " + of,
		Long: "FLAGFILE holds the flags " + of + ": one command line, with backslashes\n" +
			"at line ends if it has several lines, or one flag per line, or a Kubernetes manifest\n" +
			"with a container that runs this command.",
		Example: "  pdproxy import " + name + " router.flags > config.toml",
		Args:    arguments("FLAGFILE"),
		RunE: func(_ *cobra.Command, args []string) error {
			file, err := readImport(args[0])
			if err != nil {
				return err
			}
			return a.printImport(*force)(read(file))
		},
	})
}

func (a *app) importFile(name, example, short string, read func(importer.File) (importer.Result, error), force *bool) *cobra.Command {
	return a.addJSON(&cobra.Command{
		Use:     name + " FILE",
		Short:   short,
		Example: "  pdproxy import " + name + " " + example + " > config.toml",
		Args:    arguments("FILE"),
		RunE: func(_ *cobra.Command, args []string) error {
			file, err := readImport(args[0])
			if err != nil {
				return err
			}
			return a.printImport(*force)(read(file))
		},
	})
}

// readImport reads one input.
func readImport(path string) (importer.File, error) {
	data, err := os.ReadFile(path)
	return importer.File{Name: path, Text: data}, err
}

// importResult is the result as JSON.
type importResult struct {
	importer.Result
	Problems importer.Problems `json:"problems"`
}

// printImport returns a function that prints a result, or returns the problems that prevented
// one. Without force, a lost setting is a problem.
func (a *app) printImport(force bool) func(importer.Result, error) error {
	return func(res importer.Result, err error) error {
		lost := err == nil && !force && len(res.Lost) > 0
		if lost {
			res, err = importer.Result{}, importer.Problems(res.Lost)
		}
		switch {
		case a.json:
			return a.printImportJSON(res, err)
		case lost:
			return fmt.Errorf("%w\nThese settings have no equivalent, and without them requests are treated in another way: change the file, or leave the settings out with --force", err)
		case err != nil:
			return err
		}
		for _, w := range res.Warnings {
			fmt.Fprint(a.err, plain("warning: %s\n", w))
		}
		for _, l := range res.Lost {
			fmt.Fprint(a.err, plain("left out: %s\n", l))
		}
		_, err = fmt.Fprint(a.out, res.TOML)
		return exit.Failed(err)
	}
}

// printImportJSON prints a result or its problems as JSON.
func (a *app) printImportJSON(res importer.Result, err error) error {
	out := importResult{Result: res, Problems: importer.Problems{}}
	if out.Warnings == nil {
		out.Warnings, out.Lost = []importer.Finding{}, []importer.Finding{}
	}
	var problems importer.Problems
	if errors.As(err, &problems) {
		out.Problems = problems
	}
	if perr := a.printJSON(out); perr != nil {
		return exit.Failed(perr)
	}
	return err
}
