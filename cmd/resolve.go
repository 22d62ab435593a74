package cmd

import (
	"context"
	"net"
	"net/netip"
)

// resolve returns the addresses that a host name stands for, and for this machine
// itself all that it has: an engine beside the proxy is called over the loopback,
// and its peers elsewhere by another.
func resolve(ctx context.Context, host string) ([]netip.Addr, error) {
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	own := false
	for i, ip := range found {
		found[i] = ip.Unmap().WithZone("")
		own = own || found[i].IsLoopback()
	}
	if !own {
		return found, nil
	}
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	for _, a := range all {
		if network, ok := a.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(network.IP); ok {
				found = append(found, ip.Unmap())
			}
		}
	}
	return found, nil
}
