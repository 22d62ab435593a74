//go:build unix && !linux

package takeover

import "net"

// peer cannot check the process at the other end on this system: only the mode of the
// directory excludes other users.
func peer(*net.UnixConn) (pid int, err error) { return 0, nil }
