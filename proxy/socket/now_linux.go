//go:build linux && (amd64 || arm64) && !race

package socket

import (
	"syscall"
	"unsafe"
)

// mostBuffers is the maximum number of buffers in one write (IOV_MAX).
const mostBuffers = 1024

// ReadNow is read(2) on a non-blocking socket.
func ReadNow(fd uintptr, p []byte) (int, error) {
	n, _, errno := syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
	return result(n, errno)
}

// WriteNow is write(2) on a non-blocking socket.
func WriteNow(fd uintptr, p []byte) (int, error) {
	n, _, errno := syscall.RawSyscall(syscall.SYS_WRITE, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
	return result(n, errno)
}

// PeekNow is recv(2) with MSG_PEEK on a non-blocking socket.
func PeekNow(fd uintptr, p []byte) (int, error) {
	n, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)), syscall.MSG_PEEK, 0, 0)
	return result(n, errno)
}

func result(n uintptr, errno syscall.Errno) (int, error) {
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// now writes as much of the unwritten rest as the socket accepts.
func (o *output) now(fd uintptr) (int, error) {
	if len(o.bufs) == 1 {
		return WriteNow(fd, o.bufs[0])
	}
	o.vec = o.vec[:0]
	for _, b := range o.bufs[:min(len(o.bufs), mostBuffers)] {
		v := syscall.Iovec{Base: unsafe.SliceData(b)}
		v.SetLen(len(b))
		o.vec = append(o.vec, v)
	}
	n, _, errno := syscall.RawSyscall(syscall.SYS_WRITEV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(o.vec))), uintptr(len(o.vec)))
	clear(o.vec)
	return result(n, errno)
}
