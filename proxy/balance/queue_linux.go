package balance

import "golang.org/x/sys/unix"

// queued is how many connections wait for accept(2) on a socket.
func queued(fd uintptr) int {
	info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return readable(fd)
	}
	return int(info.Unacked) // of a listening socket: its queue
}
