//go:build !linux

package privatedir

import "golang.org/x/sys/unix"

// openSearch opens a folder of which only the entries are looked up.
const openSearch = unix.O_RDONLY
