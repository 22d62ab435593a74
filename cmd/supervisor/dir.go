package supervisor

import (
	"fmt"
	"hash/fnv"
	"path/filepath"
	"strconv"

	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

// servingLock is the lock file of the process that serves a configuration, alone or with
// its children.
const servingLock = "office.lock"

// slotLock returns the name of a child's lock file in the fleet's directory.
func slotLock(role node.Role, slot int) string {
	return string(role) + "-" + strconv.Itoa(slot) + ".lock"
}

// retiredLock returns the name of the lock file of a process that has a successor and
// still serves its remaining requests.
func retiredLock(pid int) string { return fmt.Sprintf("retired-%d.lock", pid) }

// openFleetDir opens the folder in which the processes of a configuration file meet. The
// caller closes it.
func openFleetDir(cfg *config.Config, path string) (*privatedir.Dir, error) {
	name := cfg.Fleet.Dir
	if name == "" {
		var err error
		if name, err = defaultFleetDir(path); err != nil {
			return nil, fmt.Errorf("fleet.dir: %w", err)
		}
	}
	dir, err := privatedir.Open(name)
	if err != nil {
		return nil, fmt.Errorf("fleet.dir: %w", err)
	}
	return dir, nil
}

// defaultFleetDir returns the folder of a configuration file. It is the same for all
// processes of this user that name the same file, by whatever path, and differs from that
// of any other file.
func defaultFleetDir(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	if real, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil {
		path = filepath.Join(real, filepath.Base(path))
	}
	h := fnv.New64a()
	h.Write([]byte(path))
	return filepath.Join(privatedir.Runtime(), fmt.Sprintf("%016x", h.Sum64())), nil
}
