package http1

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/privatedir/isolated"
)

// pdproxy is the built program.
var pdproxy string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "pdproxy-http1")
	if err == nil {
		pdproxy = filepath.Join(dir, "pdproxy")
		var out []byte
		if out, err = exec.Command("go", "build", "-o", pdproxy, "../../cmd/pdproxy").CombinedOutput(); err != nil {
			err = fmt.Errorf("%w\n%s", err, out)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := isolated.Run(m)
	os.RemoveAll(dir)
	os.Exit(code)
}
