//go:build unix && !linux

package takeover

import "net"

// peer knows nothing of the process at the other end: the mode of the directory
// is what keeps other users out.
func peer(*net.UnixConn) (pid int, err error) { return 0, nil }
