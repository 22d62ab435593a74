package quicshare

import "golang.org/x/sys/unix"

// localAddress is the kind of control message that has the address a client sent to.
const localAddress = unix.IP_RECVDSTADDR
