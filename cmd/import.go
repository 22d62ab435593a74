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
	c := &cobra.Command{
		Use:   "import",
		Short: "Convert the configuration of another router",
		Long: "Print a config.toml that does the same as the configuration of another router. A comment names each\n" +
			"setting without an equivalent. Warnings go to standard error. The output contains no secrets.",
		Example: "  pdproxy import vllm-router start-router.sh > config.toml\n  pdproxy import llm-d epp-config.yaml > config.toml",
		Args:    cobra.NoArgs,
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(a.importTRTLLM(),
		a.importFlags("vllm-router", "of vllm-router", importer.VLLMRouter),
		a.importFlags("sglang-router", "of SGLang's model gateway (sglang-router, smg)", importer.SGLangRouter),
		a.importFlags("production-stack", "of the router of vLLM's production stack", importer.ProductionStack),
		a.importYAML("llm-d", "Convert the flags or the configuration of llm-d's pd-sidecar, or an EndpointPickerConfig", importer.LLMD),
		a.importYAML("litellm", "Convert the config.yaml of LiteLLM's proxy", importer.LiteLLM))
	return c
}

func (a *app) importTRTLLM() *cobra.Command {
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
			if in.Disagg, err = importFile(args[0]); err != nil {
				return err
			}
			if metadata != "" {
				if in.Metadata, err = importFile(metadata); err != nil {
					return err
				}
			}
			return a.printImport(in.Import())
		},
	}
	c.Flags().StringVarP(&metadata, "metadata-server-config-file", "m", "", "file of the metadata server, as for trtllm-serve")
	c.Flags().IntVarP(&timeout, "request-timeout", "r", timeout, "--request_timeout of trtllm-serve, in seconds")
	return a.addJSON(c)
}

func (a *app) importFlags(name, of string, read func(importer.File) (importer.Result, error)) *cobra.Command {
	return a.addJSON(&cobra.Command{
		Use:   name + " FLAGFILE",
		Short: "Convert the flags " + of,
		Long: "FLAGFILE holds the flags " + of + ": one command line, with backslashes\n" +
			"at line ends if it has several lines, or one flag per line.",
		Example: "  pdproxy import " + name + " router.flags > config.toml",
		Args:    arguments("FLAGFILE"),
		RunE: func(_ *cobra.Command, args []string) error {
			file, err := importFile(args[0])
			if err != nil {
				return err
			}
			return a.printImport(read(file))
		},
	})
}

func (a *app) importYAML(name, short string, read func(importer.File) (importer.Result, error)) *cobra.Command {
	return a.addJSON(&cobra.Command{
		Use:     name + " FILE",
		Short:   short,
		Example: "  pdproxy import " + name + " config.yaml > config.toml",
		Args:    arguments("FILE"),
		RunE: func(_ *cobra.Command, args []string) error {
			file, err := importFile(args[0])
			if err != nil {
				return err
			}
			return a.printImport(read(file))
		},
	})
}

// importFile reads one input.
func importFile(path string) (importer.File, error) {
	data, err := os.ReadFile(path)
	return importer.File{Name: path, Text: data}, err
}

// importResult is the result as JSON.
type importResult struct {
	importer.Result
	Problems importer.Problems `json:"problems"`
}

// printImport prints a result, or returns the problems that prevented one.
func (a *app) printImport(res importer.Result, err error) error {
	if a.json {
		out := importResult{Result: res, Problems: importer.Problems{}}
		if out.Warnings == nil {
			out.Warnings = []importer.Finding{}
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
	if err != nil {
		return err
	}
	for _, w := range res.Warnings {
		fmt.Fprintln(a.err, "warning:", w)
	}
	_, err = fmt.Fprint(a.out, res.TOML)
	return exit.Failed(err)
}
