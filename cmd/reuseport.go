package cmd

import (
	"context"
	"errors"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// reusePort is a net.ListenConfig's Control: other processes of this user may open
// the same address.
func reusePort(_, _ string, c syscall.RawConn) error {
	var failed error
	err := c.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
	return errors.Join(err, failed)
}

// listenShared opens a socket whose address other processes may open too.
func listenShared(ctx context.Context, address string) (net.Listener, error) {
	c := net.ListenConfig{Control: reusePort}
	return c.Listen(ctx, "tcp", address)
}
