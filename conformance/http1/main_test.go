package http1

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/privatedir/isolated"
)

// buildDir has the built program. It ends with the process.
var buildDir string

// pdproxy builds the program at the first call and returns its path. The processes of a fuzz target
// do not need it.
var pdproxy = sync.OnceValues(func() (string, error) {
	path := filepath.Join(buildDir, "pdproxy")
	if out, err := exec.Command("go", "build", "-o", path, "../../cmd/pdproxy").CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	return path, nil
})

func TestMain(m *testing.M) {
	var err error
	if buildDir, err = os.MkdirTemp("", "pdproxy-http1"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := isolated.Run(m)
	os.RemoveAll(buildDir)
	os.Exit(code)
}
