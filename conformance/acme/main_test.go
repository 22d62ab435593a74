package acme

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/privatedir/isolated"
)

// Paths of the programs that the tests start.
var pdproxy, pebble, dnsServer string

func TestMain(m *testing.M) { os.Exit(buildAndRun(m)) }

func buildAndRun(m *testing.M) int {
	dir, err := os.MkdirTemp("", "pdproxy-acme")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	for _, args := range [][]string{
		{"build", "-o", dir, "../../cmd/pdproxy"},
		{"build", "-C", "pebble", "-o", dir, "github.com/letsencrypt/pebble/v2/cmd/pebble", "github.com/letsencrypt/pebble/v2/cmd/pebble-challtestsrv"},
	} {
		if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "go %v: %v\n%s", args, err, out)
			return 1
		}
	}
	pdproxy, pebble, dnsServer = filepath.Join(dir, "pdproxy"), filepath.Join(dir, "pebble"), filepath.Join(dir, "pebble-challtestsrv")
	return isolated.Run(m)
}
