//go:build !linux || !(amd64 || arm64)

package socket

import "net"

// Of returns c as it is.
func Of(c net.Conn) net.Conn { return c }

// WriteTo writes bufs to c, as one if c is a socket. They are not to be used any
// more.
func WriteTo(c net.Conn, bufs *net.Buffers) (int64, error) { return bufs.WriteTo(c) }
