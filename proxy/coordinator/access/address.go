package access

import (
	"net"
	"net/netip"
)

// addressOf is the address for which a connection counts. It is the peer's IPv4 address, or
// its IPv6 network of 64 bits, because one host may own such a network. All peers that do
// not come over TCP have the zero address.
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
