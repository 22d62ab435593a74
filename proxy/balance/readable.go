package balance

import "golang.org/x/sys/unix"

// readable is 1 if a connection waits for accept(2) on a socket.
func readable(fd uintptr) int {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	if err != nil || n == 0 {
		return 0
	}
	return 1
}
