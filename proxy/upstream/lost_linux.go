package upstream

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// unreceived reports whether some of what was sent has not been acknowledged by the
// peer's host.
func unreceived(c syscall.RawConn) bool {
	queued := 0
	err := c.Control(func(fd uintptr) { queued, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }) // 0: not known
	return err == nil && queued > 0
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
