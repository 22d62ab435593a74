//go:build linux && !race

package socket

import (
	"io"
	"net"
	"os"
	"syscall"
	"unsafe"
)

// Direct returns c with reads and writes that do not inform Go's scheduler. Direct returns c unchanged if
// c is no socket, such as a connection with TLS. One goroutine may read and one may write at a time.
//
// Package net informs the scheduler of each system call. After a pause of the process, the first call
// wakes the monitor thread of the runtime, which sleeps for 20 µs, finds the process idle and waits
// again. The scheduler does not need the
// information, because a socket of package net never blocks in a system call.
//
// With the race detector, Direct returns c unchanged: the detector learns the order of memory accesses
// from the calls of package syscall.
func Direct(c net.Conn) net.Conn {
	s, ok := c.(socketConn)
	if !ok {
		return c
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return c
	}
	d := &direct{socketConn: s, raw: raw}
	d.readOnce, d.writeAll = d.in.read, d.out.write
	return d
}

// socketConn is a net.Conn that is a socket.
type socketConn interface {
	net.Conn
	syscall.Conn
	CloseWrite() error
}

type direct struct {
	socketConn
	raw      syscall.RawConn
	in, out  transfer
	readOnce func(fd uintptr) bool
	writeAll func(fd uintptr) bool
}

// transfer is a read or a write.
type transfer struct {
	p   []byte
	n   int // bytes that were transferred
	err syscall.Errno
}

// Read implements net.Conn.
func (d *direct) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	n, err := d.in.run("read", d.raw.Read, d.readOnce, p)
	if n == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

// Write implements net.Conn.
func (d *direct) Write(p []byte) (int, error) {
	return d.out.run("write", d.raw.Write, d.writeAll, p)
}

// run transfers p by once, which package net calls whenever the socket is ready, until once returns
// true.
func (t *transfer) run(name string, ready func(func(fd uintptr) bool) error, once func(fd uintptr) bool, p []byte) (int, error) {
	t.p, t.n, t.err = p, 0, 0
	err := ready(once)
	t.p = nil
	if err == nil && t.err != 0 {
		err = os.NewSyscallError(name, t.err)
	}
	return t.n, err
}

func (t *transfer) read(fd uintptr) bool {
	for {
		t.n, t.err = call(syscall.SYS_READ, fd, t.p)
		if t.err != syscall.EINTR {
			return t.err != syscall.EAGAIN
		}
	}
}

func (t *transfer) write(fd uintptr) bool {
	for t.n < len(t.p) {
		n, err := call(syscall.SYS_WRITE, fd, t.p[t.n:])
		switch err {
		case 0:
			t.n += n
		case syscall.EINTR:
		case syscall.EAGAIN:
			return false
		default:
			t.err = err
			return true
		}
	}
	return true
}

// call calls the system with p, which is not empty. n is 0 with an error.
func call(trap, fd uintptr, p []byte) (n int, err syscall.Errno) {
	r, _, err := syscall.RawSyscall(trap, fd, uintptr(unsafe.Pointer(&p[0])), uintptr(len(p))) //nolint:gosec // as in package syscall
	if err != 0 {
		return 0, err
	}
	return int(r), 0
}
