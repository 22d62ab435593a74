package epp

import (
	"fmt"
	"os"
	"testing"
)

func TestMain(m *testing.M) { os.Exit(isolated(m)) }

// isolated runs the tests. The proxies that they start keep sockets, locks and tokens in a folder
// of their own. This module cannot import the package of the same name.
func isolated(m *testing.M) int {
	dir, err := os.MkdirTemp("", "pdproxy-test")
	if err == nil {
		defer os.RemoveAll(dir)
		err = os.Setenv("XDG_RUNTIME_DIR", dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}
