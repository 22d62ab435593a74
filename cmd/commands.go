package cmd

import (
	"io"

	"github.com/spf13/cobra"
)

// Commands returns all commands with their help and flags, for tools that write documents
// about them. The commands must not be executed.
func Commands() *cobra.Command {
	a := &app{out: io.Discard, err: io.Discard}
	return a.root()
}
