package config

import (
	"fmt"
	"net/netip"
	"strings"
)

// KVHosts is where an instance's peers may be sent besides its own host, as
// engine.kv_hosts says.
type KVHosts struct {
	any      bool
	networks []netip.Prefix
	names    []string
}

// ParseKVHosts reads addresses, networks (10.0.0.0/8) and names with commas
// between them; "*" is anywhere.
func ParseKVHosts(text string) (KVHosts, error) {
	var h KVHosts
	if text == "" {
		return h, nil
	}
	for entry := range strings.SplitSeq(text, ",") {
		entry = strings.TrimSpace(entry)
		network, err := netip.ParsePrefix(entry)
		ip, notIP := netip.ParseAddr(entry)
		switch {
		case entry == "*":
			h.any = true
		case err == nil:
			h.networks = append(h.networks, network)
		case notIP == nil:
			h.networks = append(h.networks, netip.PrefixFrom(ip.Unmap(), ip.Unmap().BitLen()))
		case entry != "" && validHost(entry):
			h.names = append(h.names, entry)
		default:
			return KVHosts{}, fmt.Errorf("want addresses, networks or host names with commas between them, found %q", entry)
		}
	}
	return h, nil
}

// Contains reports whether host is among them; ip is host, if it is an address.
func (h *KVHosts) Contains(host string, ip netip.Addr) bool {
	if h.any {
		return true
	}
	for _, n := range h.networks {
		if n.Contains(ip) {
			return true
		}
	}
	for _, name := range h.names {
		if strings.EqualFold(name, host) {
			return true
		}
	}
	return false
}
