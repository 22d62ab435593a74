package upstream

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// resetUnsent makes the following close send a reset if the peer's host has not
// acknowledged all sent bytes, so that it never receives the rest. A failure is
// ignored: nothing can be done about it, and a closed socket needs nothing.
func resetUnsent(c syscall.RawConn) {
	_ = c.Control(func(fd uintptr) {
		if queued, err := unix.IoctlGetInt(int(fd), unix.SIOCOUTQ); err == nil && queued > 0 {
			_ = unix.SetsockoptLinger(int(fd), unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		}
	})
}

// giveUpAfter makes a socket fail when the peer's host acknowledges nothing for limit.
// The system's own limit is a quarter of an hour.
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
