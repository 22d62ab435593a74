package docs

import (
	"fmt"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd"
)

// commandPage describes each command that help lists.
func commandPage(testing.TB) string {
	var b strings.Builder
	b.WriteString(notice + "# Command line\n\nResults go to standard output, logs and errors to standard error. " +
		"Exit status 0 means success, 1 a failure at run time, 2 an invalid command line or configuration, and 5 that pdproxy doctor found only warnings.\n")
	describeCommand(&b, cmd.Tree())
	return b.String()
}

func describeCommand(b *strings.Builder, c *cobra.Command) {
	if c.Hidden || c.Name() == "help" {
		return
	}
	text := c.Long
	if text == "" {
		text = c.Short + "."
	}
	fmt.Fprintf(b, "\n## %s\n\n%s\n", c.CommandPath(), strings.TrimSpace(text))
	if c.Runnable() {
		fmt.Fprintf(b, "\n```text\n%s\n```\n", c.UseLine())
	}
	if c.Example != "" {
		fmt.Fprintf(b, "\nExamples:\n\n```text\n%s\n```\n", strings.TrimRight(c.Example, " \n"))
	}
	if flags := strings.TrimRight(c.NonInheritedFlags().FlagUsages(), " \n"); flags != "" {
		fmt.Fprintf(b, "\nFlags:\n\n```text\n%s\n```\n", flags)
	}
	for _, sub := range c.Commands() {
		describeCommand(b, sub)
	}
}
