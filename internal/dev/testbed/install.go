package testbed

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Install installs Debian packages, unless have reports that their programs are
// present. Processes that call it at the same time take turns.
func Install(have func() error, packages ...string) error {
	if have() == nil {
		return nil
	}
	lock, err := os.OpenFile(filepath.Join(os.TempDir(), "pdproxy-apt.lock"), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	if have() == nil {
		return nil
	}
	for _, args := range [][]string{
		{"update", "-q"},
		append([]string{"install", "-q", "-y", "--no-install-recommends"}, packages...),
	} {
		apt := exec.Command("apt-get", args...)
		apt.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		if out, err := apt.CombinedOutput(); err != nil {
			return fmt.Errorf("install %s by hand; apt-get %s: %w\n%s", strings.Join(packages, ", "), args[0], err, out)
		}
	}
	return have()
}

// InstallEtcd installs etcd if it is absent.
func InstallEtcd() error { return Install(program("etcd"), "etcd-server") }

// InstallCurl installs curl if it is absent.
func InstallCurl() error { return Install(program("curl"), "curl", "ca-certificates") }

// InstallStrace installs strace if it is absent.
func InstallStrace() error { return Install(program("strace"), "strace") }

// program reports whether a program is present.
func program(name string) func() error {
	return func() error {
		_, err := exec.LookPath(name)
		return err
	}
}
