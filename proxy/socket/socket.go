// Package socket reads and writes the sockets of the data path, and the link
// between a worker and its coordinator, without telling Go's scheduler of each
// system call. A call on a socket that does not block needs no scheduler; but one
// that it is told of wakes a thread of its own whenever the process had nothing to
// do before (sysmon, which then looks around every 20 µs for a while), and that
// costs more than the call. A process that is preempted in such a call loses its
// place to another of its threads, too.
//
// On Linux only (amd64, arm64), and not under the race detector, which has to see
// all that is read and written; elsewhere everything is as package net does it.
package socket

import "net"

// Listener is l, with the connections that it accepts as Of returns them.
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
