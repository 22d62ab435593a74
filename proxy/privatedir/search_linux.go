package privatedir

import "golang.org/x/sys/unix"

// openSearch opens a folder of which only the entries are looked up, which needs no
// permission to read it.
const openSearch = unix.O_PATH

// replaceDescriptor makes to a copy of the descriptor from.
func replaceDescriptor(from, to int) error { return unix.Dup3(from, to, unix.O_CLOEXEC) }
