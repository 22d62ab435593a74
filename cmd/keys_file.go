package cmd

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/config"
)

func (a *app) keysListCommand() *cobra.Command {
	return a.addJSON(&cobra.Command{
		Use:   "list config.toml",
		Short: "List the API keys in the file of server.auth.keys_file",
		Long: `List the names of the API keys in the file that server.auth.keys_file of the
configuration names, with the attributes of their lines. The file has only hashes of
the keys, and the command does not print them.`,
		Example: "  pdproxy keys list config.toml",
		Args:    arguments("config.toml"),
		RunE: func(_ *cobra.Command, args []string) error {
			cfg, err := loadKeysConfig(args[0])
			if err != nil {
				return err
			}
			list, err := readKeys(cfg)
			if err != nil {
				return exit.Failed(err)
			}
			if a.json {
				return exit.Failed(a.printJSON(list))
			}
			return exit.Failed(a.printKeys(list))
		},
	})
}

func (a *app) printKeys(list []admission.KeyLine) error {
	w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "LINE\tNAME\tTENANT\tCLASS\tMODELS\tRPM\tTPM\tMAX")
	limit := func(n int64) string {
		if n == 0 {
			return "-"
		}
		return strconv.FormatInt(n, 10)
	}
	for _, k := range list {
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", k.Line, printable(k.Name), cmp.Or(k.Tenant, "-"), cmp.Or(k.Class, "-"),
			cmp.Or(printable(strings.Join(k.Models, ",")), "-"), limit(k.Requests), limit(k.Tokens), limit(int64(k.Max)))
	}
	return w.Flush()
}

func (a *app) keysRevokeCommand() *cobra.Command {
	number := 0
	c := a.addJSON(&cobra.Command{
		Use:   "revoke config.toml NAME",
		Short: "Remove an API key from the file of server.auth.keys_file",
		Long: `Remove the line of the key NAME from the file that server.auth.keys_file of the
configuration names. The other lines, with comments, and the permissions of the file stay
as they are. The file is complete at every moment.

A running proxy accepts the key until it reads the file again: after SIGHUP, or
"systemctl reload pdproxy". Running requests of the key continue.`,
		Example: `  pdproxy keys revoke config.toml team-a
  pdproxy keys revoke config.toml team-a --line 7     # one of several keys of that name`,
		Args: arguments("config.toml", "NAME"),
		RunE: func(_ *cobra.Command, args []string) error { return a.revokeKey(args[0], args[1], number) },
	})
	c.Flags().IntVar(&number, "line", 0, "number of the line, if several keys have the name; keys list shows it")
	c.ValidArgsFunction = func(_ *cobra.Command, args []string, _ string) (names []string, d cobra.ShellCompDirective) {
		if len(args) != 1 {
			return completeArgument([]string{"config.toml", "", ""}[min(len(args), 2)])
		}
		if cfg, err := loadKeysConfig(args[0]); err == nil {
			list, _ := readKeys(cfg) // without the file there are no names
			for _, k := range list {
				names = append(names, k.Name)
			}
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
	return c
}

func (a *app) revokeKey(path, name string, number int) error {
	cfg, err := loadKeysConfig(path)
	if err != nil {
		return err
	}
	var line admission.KeyLine
	err = editFile(cfg.Server.Auth.KeysFile, func(text []byte) ([]byte, error) {
		list, err := admission.ListKeys(text, cfg.Tenants...)
		if err != nil {
			return nil, err
		}
		if line, err = findKey(list, name, number); err != nil {
			return nil, err
		}
		after, err := admission.RemoveKey(text, line.Line, cfg.Tenants...)
		if err != nil {
			return nil, fmt.Errorf("line %d, key %s: %w", line.Line, name, err)
		}
		return after, nil
	})
	if err != nil {
		return exit.Failed(fmt.Errorf("%s: %w", cfg.Server.Auth.KeysFile, err))
	}
	if a.json {
		return exit.Failed(a.printJSON(line))
	}
	_, err = fmt.Fprintf(a.out, "%s: removed line %d, key %s\n%s\n", cfg.Server.Auth.KeysFile, line.Line, name, reloadHint)
	return exit.Failed(err)
}

const reloadHint = `A running proxy reads the file after SIGHUP, or "systemctl reload pdproxy".`

// findKey returns the line of the key of that name. number is 0 or the number of the line.
func findKey(list []admission.KeyLine, name string, number int) (found admission.KeyLine, err error) {
	var names, numbers []string
	for _, k := range list {
		names = append(names, k.Name)
		if k.Name == name && (number == 0 || number == k.Line) {
			found, numbers = k, append(numbers, strconv.Itoa(k.Line))
		}
	}
	switch {
	case len(numbers) > 1:
		return found, fmt.Errorf("several keys are named %s, in the lines %s: --line names one of them", name, strings.Join(numbers, ", "))
	case len(numbers) == 1:
		return found, nil
	case number != 0:
		return found, fmt.Errorf("--line: line %d has no key named %s", number, name)
	}
	return found, fmt.Errorf("no key is named %q%s", name, config.DidYouMean(name, names))
}

// addKey adds a line to the keys file of a configuration.
func (a *app) addKey(path, line string) error {
	cfg, err := loadKeysConfig(path)
	if err != nil {
		return err
	}
	file := cfg.Server.Auth.KeysFile
	change := func(text []byte) ([]byte, error) { return admission.AddKey(text, line, cfg.Tenants...) }
	err = editFile(file, change)
	if errors.Is(err, fs.ErrNotExist) {
		err = makeFile(file, change)
	}
	if errors.Is(err, fs.ErrExist) { // another command has made the file meanwhile
		err = editFile(file, change)
	}
	if err != nil {
		return exit.Failed(fmt.Errorf("%s: %w", file, err))
	}
	_, err = fmt.Fprintf(a.err, "%s has the new line. %s\n", file, reloadHint)
	return exit.Failed(err)
}

// loadKeysConfig reads a configuration with a keys file.
func loadKeysConfig(path string) (*config.Config, error) {
	cfg, err := loadConfig(path)
	if err == nil && cfg.Server.Auth.KeysFile == "" {
		err = config.Problems{cfg.Problem("server.auth.keys_file", "is required: it names the file of the keys")}
	}
	return cfg, err
}

func readKeys(cfg *config.Config) ([]admission.KeyLine, error) {
	text, err := os.ReadFile(cfg.Server.Auth.KeysFile)
	if err != nil {
		return nil, err
	}
	list, err := admission.ListKeys(text, cfg.Tenants...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", cfg.Server.Auth.KeysFile, err)
	}
	return list, nil
}
