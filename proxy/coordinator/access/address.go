package access

import (
	"net"
	"net/netip"
)

// addressOf returns the address that the limits count. It is the peer's IPv4 address, or
// the peer's IPv6 network of 64 bits, because one host may own such a network. A peer that
// does not use TCP has the zero address.
func addressOf(nc net.Conn) netip.Addr {
	tcp, ok := nc.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	ip := tcp.AddrPort().Addr().Unmap().WithZone("")
	if ip.Is6() {
		if p, err := ip.Prefix(64); err == nil {
			return p.Addr()
		}
	}
	return ip
}
