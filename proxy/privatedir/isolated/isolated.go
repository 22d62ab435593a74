// Package isolated keeps the tests of a package away from the folders of this machine's proxies.
//
// The decisions behind this package are in docs/design/edge.md.
package isolated

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

// Run runs the tests of a package, and returns the exit status for os.Exit. Their processes, and
// those that they start, keep sockets, locks and tokens in a folder of their own, and find no token
// of another proxy. Run removes the folder. Call it in TestMain.
func Run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "pdproxy-test")
	system := filepath.Join(dir, "run")
	if err == nil {
		defer os.RemoveAll(dir) //nolint:errcheck // a temporary folder
		err = errors.Join(os.Mkdir(system, 0o755), os.Setenv("XDG_RUNTIME_DIR", dir))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	privatedir.UseSystem(system)
	return m.Run()
}
