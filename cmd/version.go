package cmd

import (
	_ "embed"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/abi"
)

// Set by the linker (-X) for releases.
var (
	Version = "0.1.0-dev" // the release; before it, the number of the next one and "-dev"
	commit  string        // the commit it was built from
)

// abiVersions are the versions of proxy-wasm that plugins may have.
var abiVersions = []string{"0.1.0", "0.2.0", "0.2.1"}

type versionInfo struct {
	Version   string   `json:"version"`
	ABI       []string `json:"abi"`             // of proxy-wasm, for filters
	PolicyABI int      `json:"policy_contract"` // of policies
	Go        string   `json:"go"`
	Commit    string   `json:"commit"`
}

// String returns the version in one line.
func (v versionInfo) String() string {
	return fmt.Sprintf("pdproxy %s (policy contract %d, proxy-wasm %s, %s, commit %s)",
		v.Version, v.PolicyABI, strings.Join(v.ABI, ", "), v.Go, v.Commit)
}

func readVersion() versionInfo {
	v := versionInfo{Version: Version, ABI: abiVersions, PolicyABI: abi.Version, Go: runtime.Version(), Commit: commit}
	if info, ok := debug.ReadBuildInfo(); ok && v.Commit == "" {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				v.Commit = s.Value
			}
		}
	}
	if v.Commit == "" {
		v.Commit = "unknown"
	}
	return v
}

// thirdParty lists the modules that are linked in, with the texts of their licences.
//
//go:embed THIRD_PARTY_NOTICES.md
var thirdParty string

func (a *app) versionCommand() *cobra.Command {
	licenses := false
	c := &cobra.Command{
		Use:   "version",
		Short: "Print version, ABI versions, Go and commit",
		Example: `  pdproxy version
  pdproxy version --licenses     # of the modules in the program`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if licenses {
				_, err := fmt.Fprint(a.out, thirdParty)
				return err
			}
			v := readVersion()
			if a.json {
				return a.printJSON(v)
			}
			_, err := fmt.Fprintln(a.out, v)
			return err
		},
	}
	c.Flags().BoolVar(&licenses, "licenses", false, "print the third-party modules in the program, with the texts of their licences")
	return a.addJSON(c)
}
