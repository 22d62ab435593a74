// Package socket has options of TCP sockets, and a way to read and write them, that package net does not
// have.
//
// The decisions behind this package are in docs/design/attempt.md.
package socket

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// GiveUpAfter makes a socket fail when the peer's host acknowledges nothing for limit.
// The system's own limit is a quarter of an hour.
func GiveUpAfter(c syscall.RawConn, limit time.Duration) error {
	var failed error
	err := c.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(limit.Milliseconds()))
	})
	if err == nil {
		err = failed
	}
	return err
}
