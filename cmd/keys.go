package cmd

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/admission"
)

// keysCommand holds the tools for the API keys of clients.
func (a *app) keysCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "keys",
		Short: "Make, list and revoke API keys of clients",
		Example: `  pdproxy keys new team-a --config config.toml
  pdproxy keys list config.toml
  pdproxy keys revoke config.toml team-a`,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(a.keysNewCommand(), a.keysListCommand(), a.keysRevokeCommand())
	return c
}

func (a *app) keysNewCommand() *cobra.Command {
	var attributes keyAttributes
	var configFile string
	c := a.addJSON(&cobra.Command{
		Use:   "new NAME",
		Short: "Make a new API key and its line for the file of server.auth.keys_file",
		Long: `Print a new random API key, and the line for the file that server.auth.keys_file
names. The line has only a hash: the proxy cannot show the key again. With --config
the command adds the line to this file. SIGHUP makes the proxy read the file again.

NAME names the client in limits and metrics. The flags limit the client. Without
--tenant they are the limits of this key alone. With --tenant the key shares the
limits of a [[tenant]] of the configuration, or of another key that has the
limits in its line. The hash of a key that exists already
is the output of: printf %s "$KEY" | sha256sum`,
		Example: `  pdproxy keys new team-a
  pdproxy keys new team-a --config config.toml
  pdproxy keys new team-a --rpm 60 --tpm 100000 --models qwen3-32b,chat`,
		Args: arguments("NAME"),
		RunE: func(_ *cobra.Command, args []string) error {
			key, err := admission.GenerateKey(args[0], attributes.words()...)
			if err != nil {
				return fmt.Errorf("keys new: %w", err)
			}
			if configFile != "" {
				if err := a.addKey(configFile, key.Line); err != nil {
					return err
				}
			}
			if a.json {
				return exit.Failed(a.printJSON(key))
			}
			_, err = fmt.Fprintf(a.out, "key:  %s\nline: %s\n", key.Key, key.Line)
			return exit.Failed(err)
		},
	})
	f := c.Flags()
	f.StringVar(&attributes.tenant, "tenant", "", "tenant of the key (default: a tenant of its own)")
	f.StringVar(&attributes.class, "class", "", "priority class of its requests")
	f.StringSliceVar(&attributes.models, "models", nil, "names that its requests may have as the model (default: every name)")
	f.Int64Var(&attributes.rpm, "rpm", 0, "requests per minute (default: no limit)")
	f.Int64Var(&attributes.tpm, "tpm", 0, "tokens per minute, of prompts and answers (default: no limit)")
	f.Int64Var(&attributes.max, "max", 0, "requests that run or wait at the same time (default: no limit)")
	f.StringVar(&configFile, "config", "", "configuration of the proxy: add the line to its keys file, which the command makes if it does not exist")
	completeFile(c, "toml", "config")
	return c
}

// keyAttributes are the flags that become words of the line of a key.
type keyAttributes struct {
	tenant, class string
	models        []string
	rpm, tpm, max int64
}

// words returns the words of the flags that are set.
func (k *keyAttributes) words() (list []string) {
	for _, text := range [...][2]string{{"tenant", k.tenant}, {"class", k.class}, {"models", strings.Join(k.models, ",")}} {
		if text[1] != "" {
			list = append(list, text[0]+"="+text[1])
		}
	}
	for _, n := range [...]struct {
		name  string
		value int64
	}{{"rpm", k.rpm}, {"tpm", k.tpm}, {"max", k.max}} {
		if n.value != 0 {
			list = append(list, n.name+"="+strconv.FormatInt(n.value, 10))
		}
	}
	return list
}
