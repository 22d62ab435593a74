package sidecar

import (
	"net"
	"net/netip"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

// find returns the instance at an address, host:port; nil if no instance has it.
func (sc *Sidecar) find(s *engine.Snapshot, address string) *engine.Instance {
	known := sc.addresses.Load()
	if known == nil || known.of != s {
		known = &addresses{of: s, by: make(map[string]*engine.Instance)}
		for _, i := range s.Instances {
			at := canonicalAddress(i.Spec.Address())
			if other := known.by[at]; other == nil || other.State() == engine.Draining {
				known.by[at] = i
			}
		}
		sc.addresses.Store(known)
	}
	return known.by[canonicalAddress(address)]
}

// withoutScheme returns the host:port of an address. A header may also give it as a URL,
// http://host:port, as llm-d's sidecar accepts it. The scheme of the call is that of the
// engine's own URL.
func withoutScheme(address string) string {
	for _, scheme := range [...]string{"http://", "https://"} {
		if len(address) >= len(scheme) && strings.EqualFold(address[:len(scheme)], scheme) {
			return strings.TrimSuffix(address[len(scheme):], "/")
		}
	}
	return address
}

// canonicalAddress returns the one spelling of host:port. Other text stays as it is.
func canonicalAddress(address string) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	return net.JoinHostPort(canonicalHost(host), port)
}

// canonicalHost returns the one spelling of a host.
func canonicalHost(host string) string {
	if ip, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return ip.Unmap().String()
	}
	return strings.TrimSuffix(strings.ToLower(host), ".")
}
