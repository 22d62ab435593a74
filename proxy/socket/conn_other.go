//go:build !linux || !(amd64 || arm64)

package socket

import "net"

// Of returns c unchanged.
func Of(c net.Conn) net.Conn { return c }

// WriteTo writes bufs to c, in one write if c is a socket. bufs must not be used
// afterwards.
func WriteTo(c net.Conn, bufs *net.Buffers) (int64, error) { return bufs.WriteTo(c) }
