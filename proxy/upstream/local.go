package upstream

import (
	"errors"
	"net"
	"syscall"
)

// IsLocal reports whether err, from a dial, is a failure of this host: it has no
// descriptor, port or memory left for a connection.
func IsLocal(err error) bool {
	for _, errno := range [...]syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return errors.Is(err, syscall.EADDRNOTAVAIL) && !toIPv6(err)
}

// toIPv6 reports whether err comes from a dial to an IPv6 address. A host without IPv6
// always fails there with EADDRNOTAVAIL, so that is no lack of ports.
func toIPv6(err error) bool {
	var oe *net.OpError
	if !errors.As(err, &oe) {
		return false
	}
	addr, ok := oe.Addr.(*net.TCPAddr)
	return ok && addr.IP.To4() == nil
}
