package privatedir

import "golang.org/x/sys/unix"

// openSearch opens a folder of which only the entries are looked up, which needs no
// permission to read it.
const openSearch = unix.O_PATH
