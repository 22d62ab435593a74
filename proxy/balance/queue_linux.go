package balance

import "golang.org/x/sys/unix"

// queued returns the number of connections that wait for accept(2) on a socket.
func queued(fd uintptr) int {
	info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return readable(fd)
	}
	return int(info.Unacked) // for a listening socket: the length of its queue
}
