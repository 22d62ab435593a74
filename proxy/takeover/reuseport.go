package takeover

import (
	"errors"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// Shared returns a configuration for sockets whose address other processes of this user
// may open too.
func Shared() *net.ListenConfig {
	return &net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var failed error
		err := c.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		return errors.Join(err, failed)
	}}
}
