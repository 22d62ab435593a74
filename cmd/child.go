package cmd

import (
	"path/filepath"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/cmd/supervisor"
	"github.com/pdproxy/pdproxy/proxy/config"
)

const childName = "child"

// childCommand is the command with which a supervisor starts the processes of its fleet.
func (a *app) childCommand() *cobra.Command {
	var role, dir string
	var slot int
	c := &cobra.Command{
		Use:    childName + " config.toml",
		Short:  "A process of a fleet, started by pdproxy run",
		Hidden: true,
		Args:   arguments("config.toml"),
		RunE: func(_ *cobra.Command, args []string) error {
			log, err := a.logger()
			if err != nil {
				return err
			}
			return supervisor.RunChild(supervisor.ChildOptions{
				Role: node.Role(role), Slot: slot, Dir: dir,
				Load:    func() (*config.Config, error) { return loadConfig(args[0]) },
				Version: Version, Log: log,
			})
		},
	}
	c.Flags().StringVar(&role, "role", "", "coordinator or worker")
	c.Flags().StringVar(&dir, "dir", "", "directory of the fleet")
	c.Flags().IntVar(&slot, "slot", 0, "number of the process among those of its role")
	return a.addLog(c)
}

// childArgs returns a function that returns the command line of a child of this process.
func (a *app) childArgs(path string) func(role node.Role, slot int, dir string) []string {
	if abs, err := filepath.Abs(path); err == nil {
		path = abs
	}
	return func(role node.Role, slot int, dir string) []string {
		return []string{
			childName, "--role", string(role), "--slot", strconv.Itoa(slot), "--dir", dir,
			"--log-level", a.logLevel, "--log-format", a.logFormat, path,
		}
	}
}
