//go:build unix && !(linux && (amd64 || arm64) && !race)

package socket

import "syscall"

// ReadNow is read(2) on a non-blocking socket.
func ReadNow(fd uintptr, p []byte) (int, error) { return syscall.Read(int(fd), p) }

// WriteNow is write(2) on a non-blocking socket.
func WriteNow(fd uintptr, p []byte) (int, error) { return syscall.Write(int(fd), p) }

// PeekNow is recv(2) with MSG_PEEK on a non-blocking socket.
func PeekNow(fd uintptr, p []byte) (int, error) {
	n, _, err := syscall.Recvfrom(int(fd), p, syscall.MSG_PEEK)
	return n, err
}
