package upstream

import (
	"syscall"

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
