//go:build linux

package chaos

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/privatedir/isolated"
)

// inside names the built program, in the process that runs the tests.
const inside = "PDPROXY_CHAOS_PROGRAM"

// pdproxy is the built program.
var pdproxy = os.Getenv(inside)

// TestMain builds the program and runs the tests as the first process of new
// namespaces. All their processes end with them, and they have a network of
// their own. A user other than root is root inside.
func TestMain(m *testing.M) {
	if pdproxy != "" {
		os.Exit(isolated.Run(m))
	}
	if err := testbed.InstallEtcd(); err != nil { // inside there is no network to fetch it from
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code, err := outside()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

func outside() (int, error) {
	dir, err := os.MkdirTemp("", "chaos")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "pdproxy")
	if out, err := exec.Command("go", "build", "-o", program, "../../cmd/pdproxy").CombinedOutput(); err != nil {
		return 1, fmt.Errorf("%w\n%s", err, out)
	}
	runtime.LockOSThread() // the one whose end would end the child
	c := exec.Command(os.Args[0], os.Args[1:]...)
	c.Env = append(os.Environ(), inside+"="+program)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
	if uid := os.Getuid(); uid != 0 {
		c.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		c.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}}
		c.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	err = c.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return max(exit.ExitCode(), 1), nil
	case err != nil:
		return 1, fmt.Errorf("namespaces need root, or user namespaces that are allowed: %w", err)
	}
	return 0, nil
}
