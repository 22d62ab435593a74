package cmd

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/admission"
)

// keysCommand holds the tools for the API keys of clients.
func (a *app) keysCommand() *cobra.Command {
	c := &cobra.Command{
		Use:     "keys",
		Short:   "Make API keys for clients",
		Example: "  pdproxy keys new team-a",
		Args:    cobra.NoArgs,
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(a.keysNewCommand())
	return c
}

func (a *app) keysNewCommand() *cobra.Command {
	return a.addJSON(&cobra.Command{
		Use:   "new NAME",
		Short: "Print a new API key and its line for the file of server.auth.keys_file",
		Long: `Print a new random API key, and the line for the file that server.auth.keys_file
names. The line has only a hash: the proxy cannot show the key again. SIGHUP makes
the proxy read the file again.

NAME names the client in limits and metrics. The hash of a key that exists already
is the output of: printf %s "$KEY" | sha256sum`,
		Example: `  pdproxy keys new team-a
  pdproxy keys new --json team-a`,
		Args: arguments("NAME"),
		RunE: func(_ *cobra.Command, args []string) error {
			key, err := admission.GenerateKey(args[0])
			switch {
			case err != nil:
				return fmt.Errorf("keys new: %w", err)
			case a.json:
				return exit.Failed(a.printJSON(key))
			}
			_, err = fmt.Fprintf(a.out, "key:  %s\nline: %s\n", key.Key, key.Line)
			return exit.Failed(err)
		},
	})
}
