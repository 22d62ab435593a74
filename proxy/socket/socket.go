// Package socket reads and writes the sockets of the data path, and the link between a
// worker and its coordinator, without notifying Go's scheduler of each system call. A
// call on a non-blocking socket does not need the scheduler. But if the process was
// idle before, a notified call wakes a separate thread (sysmon, which then polls every
// 20 µs for a while), and that costs more than the call. A process that is preempted in
// a notified call also loses its processor to another of its threads.
//
// This holds on Linux (amd64, arm64) without the race detector, which has to see all
// reads and writes. Elsewhere the package uses package net.
//
// The decisions behind this package are in docs/design/attempt.md.
package socket

import "net"

// Listener returns a listener that applies Of to the accepted connections of l.
func Listener(l net.Listener) net.Listener { return listener{l} }

type listener struct{ net.Listener }

// Accept implements net.Listener.
func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return Of(c), nil
}
