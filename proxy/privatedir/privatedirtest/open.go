// Package privatedirtest opens private folders for tests.
//
// The decisions behind this package are in docs/design/edge.md.
package privatedirtest

import (
	"path/filepath"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

// Open returns a new private folder. The end of the test closes and removes it.
func Open(t testing.TB) *privatedir.Dir {
	t.Helper()
	d, err := privatedir.Open(filepath.Join(t.TempDir(), "run"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}
