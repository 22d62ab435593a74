package admission

import (
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// Proxies are the networks of the proxies in front of this one whose X-Forwarded-For is trusted.
// The zero value is none. It is immutable and safe for concurrent use.
type Proxies []netip.Prefix

// Client returns the name of the client for limits: the name of its key, else its address. All
// addresses of an IPv6 /64 network are one client. If the peer is a trusted proxy, the address is
// that of X-Forwarded-For.
func (p Proxies) Client(r *http.Request) string {
	if c, _ := r.Context().Value(clientKey{}).(*client); c != nil {
		return c.name
	}
	return networkOf(p.Address(r))
}

// Address returns the address of the client of r, without a port. If the peer is a trusted proxy, the
// address is that of X-Forwarded-For.
func (p Proxies) Address(r *http.Request) string {
	if len(p) > 0 {
		if peer, err := netip.ParseAddrPort(r.RemoteAddr); err == nil && p.contains(peer.Addr()) {
			return p.forwarded(peer.Addr(), r.Header["X-Forwarded-For"]).String()
		}
	}
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	return host
}

// forwarded returns the address of the client of a trusted peer. Each proxy adds the address of its
// own peer at the end of the lines, so that the client is the last address that is no trusted proxy:
// everything before that address may be invented.
func (p Proxies) forwarded(peer netip.Addr, lines []string) (client netip.Addr) {
	client = peer
	for _, line := range slices.Backward(lines) {
		for line != "" {
			var last string
			if i := strings.LastIndexByte(line, ','); i >= 0 {
				line, last = line[:i], line[i+1:]
			} else {
				line, last = "", line
			}
			if last = strings.TrimSpace(last); last == "" {
				continue
			}
			ip, ok := forwardedAddress(last)
			if !ok {
				return client
			}
			if client = ip; !p.contains(ip) {
				return client
			}
		}
	}
	return client
}

// networkOf returns the /64 network of an IPv6 address. An IPv4-mapped address stays one
// address.
func networkOf(host string) string {
	if !strings.Contains(host, ":") { // an IPv4 address has only one form
		return host
	}
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return host
	}
	if ip = ip.Unmap().WithZone(""); ip.Is4() || ip.IsLoopback() {
		return ip.String()
	}
	return netip.PrefixFrom(ip, 64).Masked().String()
}

// contains reports whether ip is the address of a trusted proxy.
func (p Proxies) contains(ip netip.Addr) bool {
	ip = ip.Unmap().WithZone("")
	return slices.ContainsFunc(p, func(n netip.Prefix) bool { return n.Contains(ip) })
}

// forwardedAddress reads an entry of X-Forwarded-For: an address, which some proxies write
// with a port.
func forwardedAddress(text string) (netip.Addr, bool) {
	if ip, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil {
		return ip.Unmap(), true
	}
	at, err := netip.ParseAddrPort(text)
	return at.Addr().Unmap(), err == nil
}
