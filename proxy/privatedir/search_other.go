//go:build !linux

package privatedir

import "golang.org/x/sys/unix"

// openSearch opens a folder of which only the entries are looked up.
const openSearch = unix.O_RDONLY

// replaceDescriptor makes to a copy of the descriptor from.
func replaceDescriptor(from, to int) error {
	if err := unix.Dup2(from, to); err != nil {
		return err
	}
	unix.CloseOnExec(to)
	return nil
}
