//go:build unix

package upstream

import (
	"io"
	"syscall"
)

// quiet reports whether the socket has nothing to read: no unrequested data, no end of
// the stream, no error. It does not block.
func quiet(fd uintptr) bool {
	var b [1]byte
	for {
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK)
		if err != syscall.EINTR {
			return err == syscall.EAGAIN
		}
	}
}

const canFollow = true

// readNow reads the bytes that are there. again is true if there are none. The end is
// io.EOF.
func readNow(fd uintptr, p []byte) (n int, again bool, err error) {
	for {
		n, err = syscall.Read(int(fd), p)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return 0, true, nil
		case err != nil:
			return 0, false, err
		case n == 0:
			return 0, false, io.EOF
		default:
			return n, false, nil
		}
	}
}

func isErrno(err error) bool {
	_, ok := err.(syscall.Errno)
	return ok
}
