package cmd

import (
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/cmd/supervisor"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// takeoverFlag is the flag with which SIGUSR2 starts the next process.
const takeoverFlag = "--takeover"

func (a *app) runCommand() *cobra.Command {
	takeover := false
	c := &cobra.Command{
		Use:   "run config.toml",
		Short: "Serve until SIGINT or SIGTERM, then drain",
		Long: `Serve until SIGINT or SIGTERM, then drain. A second signal stops at once.

SIGHUP reads the configuration again. SIGUSR2 starts the program that is now on
disk; that program takes the sockets over, and this process finishes its requests.`,
		Example: `  pdproxy run config.toml
  pdproxy run --log-format json config.toml
  pdproxy run --takeover config.toml     # replace the process that runs this file`,
		Args: arguments("config.toml"),
		RunE: func(_ *cobra.Command, args []string) error {
			log, err := a.logger()
			if err != nil {
				return err
			}
			return a.run(args[0], takeover, log)
		},
	}
	c.Flags().BoolVar(&takeover, takeoverFlag[2:], false, "take the sockets over from the process that runs this configuration; that process finishes its requests and ends")
	return a.addLog(c)
}

// run serves a configuration file until a signal ends it or a successor
// replaces it.
func (a *app) run(path string, takeover bool, log *slog.Logger) error {
	return supervisor.Run(supervisor.Options{
		Path:     path,
		Load:     func() (*config.Config, error) { return loadConfig(path) },
		Takeover: takeover, TakeoverFlag: takeoverFlag,
		ChildArgs: a.childArgs(path),
		Version:   Version, Log: log,
	})
}
