package admission

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// Proxies are the networks of the proxies in front of this one whose X-Forwarded-For is trusted.
// The zero value is none. It is immutable and safe for concurrent use.
type Proxies []netip.Prefix

// Client returns the name of the client for limits: as the function Client, but behind a
// trusted proxy the address is that of the client that the proxy names. Each proxy adds the
// address of its own peer at the end, so that the client is the last address that is no
// trusted proxy: everything before that address may be invented.
func (p Proxies) Client(r *http.Request) string {
	if len(p) == 0 || KeyName(r) != "" {
		return Client(r)
	}
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil || !p.contains(peer.Addr()) {
		return Client(r)
	}
	client := peer.Addr()
	for _, line := range slices.Backward(r.Header["X-Forwarded-For"]) {
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
				return networkOf(client.String())
			}
			client = ip
			if !p.contains(ip) {
				return networkOf(client.String())
			}
		}
	}
	return networkOf(client.String())
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
