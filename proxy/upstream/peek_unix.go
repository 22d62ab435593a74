//go:build unix

package upstream

import "syscall"

// quiet reports whether nothing waits to be read on the socket: no data that
// nobody asked for, no end of the stream, no error. It does not block.
func quiet(fd uintptr) bool {
	var b [1]byte
	for {
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK)
		if err != syscall.EINTR {
			return err == syscall.EAGAIN
		}
	}
}
