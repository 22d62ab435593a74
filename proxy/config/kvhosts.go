package config

import (
	"fmt"
	"math"
	"net/netip"
	"strings"
)

// KVHosts is a set of hosts, in addition to an instance's own, that the instance may
// name to its peers: engine.kv_hosts.
type KVHosts struct {
	any      bool
	networks []netip.Prefix
	names    []string
}

// ParseKVHosts parses addresses, networks (10.0.0.0/8) and names, separated by commas;
// "*" is any host.
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

// Contains reports whether host is in the set; ip is host if it is an address.
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

// wide reports whether h contains a large part of the addresses of a family, as
// networks or as "*".
func (h *KVHosts) wide() bool {
	const large = 1.0 / 64 // of all addresses: 10.0.0.0/8 is a 256th, fc00::/7 a 128th
	var v4, v6 float64
	for _, n := range h.networks {
		switch ip := n.Addr(); {
		case ip.Is4():
			v4 += math.Ldexp(1, -n.Bits())
		case ip.Is4In6() && n.Bits() >= 96:
			v4 += math.Ldexp(1, 96-n.Bits())
		default:
			v6 += math.Ldexp(1, -n.Bits())
		}
	}
	return h.any || v4 >= large || v6 >= large
}

// CheckAdded returns an error if an engine has a key that only the operator's own files
// may set: one that names a local file, or that widens trust. It is for engines that
// come over a network: by POST /v1/engines or as a registration. The error names the
// key. A malformed kv_hosts is rejected too.
func (e Engine) CheckAdded() error {
	hosts, err := ParseKVHosts(e.KVHosts)
	for _, k := range []struct {
		key string
		set bool
		why string
	}{
		{"api_key_file", e.APIKeyFile != "", "names local files"},
		{"ca", e.CA != "", "names local files"},
		{"insecure_skip_verify", e.InsecureSkipVerify, "widens trust to any certificate"},
		{"kv_hosts", err != nil || hosts.wide(), "widens trust to most hosts"},
	} {
		if k.set {
			return Problems{{Key: k.key, Message: k.why + "; only the configuration of the proxy may do that"}}
		}
	}
	return nil
}
