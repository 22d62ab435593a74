package cmd

import (
	"io"

	"github.com/spf13/cobra"
)

// Tree returns all commands with their flags, for manual pages and other documents that are
// generated from the commands. The commands write no output.
func Tree() *cobra.Command {
	return (&app{out: io.Discard, err: io.Discard}).root()
}
