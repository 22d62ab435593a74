package sidecar

import (
	"net"
	"net/netip"
	"strings"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

// directory finds instances by their addresses. Safe for concurrent use.
type directory struct {
	endpoints bool // an instance has the address of its endpoint for gateways too
	current   atomic.Pointer[addresses]
}

// addresses has the instances of one snapshot by host:port.
type addresses struct {
	of *engine.Snapshot
	by map[string]*engine.Instance
}

// find returns the instance at an address, host:port; nil if no instance has it.
func (d *directory) find(s *engine.Snapshot, address string) *engine.Instance {
	known := d.current.Load()
	if known == nil || known.of != s {
		known = &addresses{of: s, by: make(map[string]*engine.Instance)}
		for _, i := range s.Instances {
			known.add(i.Spec.Address(), i)
			if at, ok := i.Spec.GatewayEndpoint(); ok && d.endpoints {
				known.add(at.String(), i)
			}
		}
		d.current.Store(known)
	}
	return known.by[canonicalAddress(address)]
}

// add notes the address of an instance. An instance that drains makes room for another one.
func (a *addresses) add(address string, i *engine.Instance) {
	at := canonicalAddress(address)
	if other := a.by[at]; other == nil || other.State() == engine.Draining {
		a.by[at] = i
	}
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
