package cmd

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// completeTree adds the completion of files to c and all commands below, and the check of
// the names of subcommands. The names of the arguments in c.Use decide: DIR is a folder, FILE
// is any file, and config.toml is a file with that ending. Flags that end in -file are files.
// All other arguments and flags without a completion have none: a file name would be wrong.
func completeTree(c *cobra.Command) {
	use, _, _ := strings.Cut(c.Use, " --") // a flag that is needed
	names := strings.Fields(strings.NewReplacer("[", "", "]", "").Replace(use))[1:]
	if c.ValidArgsFunction == nil {
		c.ValidArgsFunction = func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) >= len(names) {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return completeArgument(names[len(args)])
		}
	}
	if c.HasSubCommands() {
		c.Args = subcommand
	}
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if strings.HasSuffix(f.Name, "-file") {
			completeFile(c, "", f.Name)
		}
	})
	for _, sub := range c.Commands() {
		completeTree(sub)
	}
}

// completeArgument returns the completion of an argument of that name.
func completeArgument(name string) ([]string, cobra.ShellCompDirective) {
	switch suffix := filepath.Ext(name); {
	case name == "DIR":
		return nil, cobra.ShellCompDirectiveFilterDirs
	case suffix == ".yaml":
		return []string{"yaml", "yml"}, cobra.ShellCompDirectiveFilterFileExt
	case suffix != "":
		return []string{suffix[1:]}, cobra.ShellCompDirectiveFilterFileExt
	case strings.HasSuffix(name, "FILE"):
		return nil, cobra.ShellCompDirectiveDefault
	}
	return nil, cobra.ShellCompDirectiveNoFileComp
}

// completeFile completes the names of files with that suffix for flags of c; "" stands for
// every file.
func completeFile(c *cobra.Command, suffix string, flags ...string) {
	list, directive := []string(nil), cobra.ShellCompDirectiveDefault
	if suffix != "" {
		list, directive = []string{suffix}, cobra.ShellCompDirectiveFilterFileExt
	}
	for _, name := range flags {
		// The only possible error is that the flag has a completion already, which then stays.
		_ = c.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(list, directive))
	}
}

// subcommand rejects an argument that is no subcommand of c.
func subcommand(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var names []string
	for _, sub := range c.Commands() {
		if !sub.Hidden {
			names = append(names, sub.Name())
		}
	}
	err := config.OneOf(args[0], names...)
	if !c.HasParent() {
		return fmt.Errorf("the command %w", err)
	}
	return fmt.Errorf("%s: the command %w", strings.TrimPrefix(c.CommandPath(), "pdproxy "), err)
}
