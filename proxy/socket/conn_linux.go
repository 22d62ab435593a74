//go:build linux && (amd64 || arm64)

package socket

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
)

// descriptor is a net.Conn that is directly a socket.
type descriptor interface {
	net.Conn
	syscall.Conn
	CloseWrite() error
}

// Of returns c with cheaper reads and writes. A connection that is not directly a
// socket, such as TLS, is returned unchanged. Use the result in place of c.
func Of(c net.Conn) net.Conn {
	d, ok := c.(descriptor)
	if !ok {
		return c
	}
	raw, err := d.SyscallConn()
	if err != nil {
		return c
	}
	s := &conn{descriptor: d, raw: raw}
	s.in.once, s.out.once = s.in.read, s.out.write
	return s
}

// conn is a socket. Its methods behave as those of package net, with other system
// calls.
type conn struct {
	descriptor
	raw syscall.RawConn

	reading sync.Mutex
	in      input // guarded by reading
	writing sync.Mutex
	out     output // guarded by writing
}

// Read implements net.Conn.
func (c *conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	c.reading.Lock()
	defer c.reading.Unlock()
	c.in.p = p
	err := c.raw.Read(c.in.once)
	c.in.p = nil
	switch {
	case err != nil:
		return 0, c.failed("read", err)
	case c.in.err != nil:
		return 0, c.failed("read", c.in.err)
	case c.in.n == 0:
		return 0, io.EOF
	}
	return c.in.n, nil
}

// Write implements net.Conn.
func (c *conn) Write(p []byte) (int, error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.out.one[0] = p
	n, err := c.write(c.out.one[:])
	return int(n), err
}

// write writes the buffers in order and consumes them. The caller holds c.writing.
func (c *conn) write(bufs net.Buffers) (int64, error) {
	c.out.bufs, c.out.n, c.out.err = bufs, 0, nil
	err := c.raw.Write(c.out.once)
	clear(bufs)
	c.out.bufs = nil
	if err == nil {
		err = c.out.err
	}
	if err != nil {
		err = c.failed("write", err)
	}
	return c.out.n, err
}

// failed converts an error to the form of package net.
func (c *conn) failed(op string, err error) error {
	if errno, ok := err.(syscall.Errno); ok {
		err = os.NewSyscallError(op, errno)
	}
	var of *net.OpError
	if errors.As(err, &of) { // the deadline has passed, or c is closed
		err = of.Err
	}
	local, remote := c.LocalAddr(), c.RemoteAddr()
	return &net.OpError{Op: op, Net: local.Network(), Source: local, Addr: remote, Err: err}
}

// WriteTo writes bufs to c, in one write if c is a socket. bufs must not be used
// afterwards.
func WriteTo(c net.Conn, bufs *net.Buffers) (int64, error) {
	s, ok := c.(*conn)
	if !ok {
		return bufs.WriteTo(c)
	}
	s.writing.Lock()
	defer s.writing.Unlock()
	return s.write(*bufs)
}

// input is the state of a read. It allocates nothing.
type input struct {
	p    []byte
	n    int
	err  error
	once func(fd uintptr) bool
}

func (i *input) read(fd uintptr) bool {
	for {
		i.n, i.err = ReadNow(fd, i.p)
		if i.err != syscall.EINTR {
			return i.err != syscall.EAGAIN
		}
	}
}

// output is the state of a write. It allocates only for many buffers.
type output struct {
	bufs net.Buffers // the unwritten rest
	one  [1][]byte   // memory of bufs
	vec  []syscall.Iovec
	n    int64
	err  error
	once func(fd uintptr) bool
}

func (o *output) write(fd uintptr) bool {
	for o.left() {
		n, err := o.now(fd)
		switch err {
		case nil:
			o.wrote(n)
		case syscall.EINTR:
		case syscall.EAGAIN:
			return false
		default:
			o.err = err
			return true
		}
	}
	return true
}

// left reports whether bytes are unwritten. The first of bufs is then not empty.
func (o *output) left() bool {
	for len(o.bufs) > 0 && len(o.bufs[0]) == 0 {
		o.bufs = o.bufs[1:]
	}
	return len(o.bufs) > 0
}

// wrote removes n written bytes from bufs.
func (o *output) wrote(n int) {
	o.n += int64(n)
	for n > 0 {
		k := min(n, len(o.bufs[0]))
		o.bufs[0] = o.bufs[0][k:]
		if n -= k; n > 0 {
			o.bufs = o.bufs[1:]
		}
	}
}
