package privatedir

import (
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// systemRuntime is where services keep their sockets and locks. Only UseSystem changes it.
var systemRuntime = "/run"

// UseSystem makes another folder the one of services, for tests. It must not be called while another
// goroutine uses the package.
func UseSystem(folder string) { systemRuntime = folder }

// Runtime returns the path of the folder for the sockets, locks and keys of this
// user's processes: pdproxy in $XDG_RUNTIME_DIR if that is a private folder of the
// user; else /run/pdproxy for root, and for a user whose service manager has made
// /run/pdproxy for it; else pdproxy-UID in the temporary folder. Runtime makes nothing;
// Open checks the folder.
func Runtime() string { return Runtimes()[0] }

// Runtimes returns the path of Runtime first. The paths of Runtime in other processes of this user,
// whose environment may differ, follow: a service has no $XDG_RUNTIME_DIR, but the user's shell
// usually has one.
func Runtimes() []string { return runtimesBelow(systemRuntime) }

func runtimesBelow(system string) (paths []string) {
	const name = "pdproxy"
	if base := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(base) {
		if d, err := OpenExisting(base); err == nil {
			d.Close()
			paths = append(paths, filepath.Join(base, name))
		}
	}
	service := filepath.Join(system, name)
	rootCanMakeIt := os.Geteuid() == 0 && unix.Access(system, unix.W_OK) == nil // false on a read-only file system
	if rootCanMakeIt || ownFolder(service) {
		paths = append(paths, service)
	}
	return append(paths, filepath.Join(os.TempDir(), name+"-"+strconv.Itoa(os.Geteuid())))
}

// ownFolder reports whether a folder belongs to this user and others cannot change it.
// Others may read it: the folders below are private.
func ownFolder(path string) bool {
	f, err := openFolder(path, 0, openSearch, func(f *os.File) error {
		info, err := f.Stat()
		if err != nil {
			return err
		}
		if st, ok := info.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Geteuid() {
			return fs.ErrPermission
		}
		return checkAbove(f)
	})
	if err != nil {
		return false
	}
	f.Close()
	return true
}
