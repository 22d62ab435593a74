package access

import (
	"net"
	"net/netip"
)

// addressOf is the address that a connection counts for: the peer's IPv4 address or its IPv6
// network of 64 bits, which one host may have for itself. The zero address is that of
// all peers that do not come over TCP.
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
