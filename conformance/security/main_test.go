package security

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/privatedir/isolated"
)

// patience bounds every wait for a condition. It is not a claim about speed.
const patience = 45 * time.Second

var (
	// pdproxy is the built program.
	pdproxy string
	// buildDir is readable by every user, so that a test can run the program as
	// another one. It ends with the process.
	buildDir string
)

// long is true in the long tier.
func long() bool { return os.Getenv("PDPROXY_SECURITY") == "long" }

// times is how often the short and the long tier repeat an attack.
func times(short, longer int) int {
	if long() {
		return longer
	}
	return short
}

func TestMain(m *testing.M) {
	if os.Getenv(helperVariable) != "" {
		os.Exit(runHelper(os.Args[1:]))
	}
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

func run(m *testing.M) (int, error) {
	if tier := os.Getenv("PDPROXY_SECURITY"); tier != "" && tier != "long" {
		return 1, fmt.Errorf("PDPROXY_SECURITY=%q: the only value is long", tier)
	}
	var err error
	if buildDir, err = os.MkdirTemp("", "pdproxy-security"); err != nil {
		return 1, err
	}
	defer os.RemoveAll(buildDir)
	if err := os.Chmod(buildDir, 0o755); err != nil {
		return 1, err
	}
	pdproxy = filepath.Join(buildDir, "pdproxy")
	if out, err := exec.Command("go", "build", "-o", pdproxy, "../../cmd/pdproxy").CombinedOutput(); err != nil {
		return 1, fmt.Errorf("%w\n%s", err, out)
	}
	return isolated.Run(m), nil
}

// TestLong runs the tests that only the long tier has.
func TestLong(t *testing.T) {
	if !long() {
		return // the package comment lists the tiers
	}
	t.Run("browser", testBrowser)
}
