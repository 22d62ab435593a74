package quicshare

import "golang.org/x/sys/unix"

// localAddress is the type of the control message that carries the packet's destination
// address.
const localAddress = unix.IP_RECVDSTADDR
