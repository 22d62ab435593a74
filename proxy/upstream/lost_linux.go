package upstream

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// withdraw makes the close that follows a reset, where some of what was sent has not
// been acknowledged by the peer's host: that then never gets it. Nothing can be done
// about a failure, nor need be of a socket that is already closed.
func withdraw(c syscall.RawConn) {
	_ = c.Control(func(fd uintptr) {
		if queued, err := unix.IoctlGetInt(int(fd), unix.SIOCOUTQ); err == nil && queued > 0 {
			_ = unix.SetsockoptLinger(int(fd), unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		}
	})
}

// giveUpAfter has a socket fail when its peer's host acknowledges nothing for so
// long: the system's own limit is a quarter of an hour.
func giveUpAfter(c syscall.RawConn, limit time.Duration) error {
	var failed error
	err := c.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(limit.Milliseconds()))
	})
	if err == nil {
		err = failed
	}
	return err
}
