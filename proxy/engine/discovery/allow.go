package discovery

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// allowList holds the permitted addresses of found engines. The empty list allows all.
type allowList struct {
	networks []netip.Prefix
	names    []string // in lower case; a name that begins with a dot matches all names that end with it
}

// newAllowList parses discovery.allow, which has been validated.
func newAllowList(entries []string) allowList {
	var a allowList
	for _, entry := range entries {
		if network, err := netip.ParsePrefix(entry); err == nil {
			a.networks = append(a.networks, network)
		} else if ip, err := netip.ParseAddr(entry); err == nil {
			a.networks = append(a.networks, netip.PrefixFrom(ip, ip.BitLen()))
		} else {
			a.names = append(a.names, canonical(entry))
		}
	}
	return a
}

// check returns why an engine is not allowed: a host that the proxy or other engines
// would connect to is not in the list.
func (a allowList) check(e config.Engine) error {
	if len(a.networks)+len(a.names) == 0 {
		return nil
	}
	hosts := map[string]string{"url": "", "bootstrap_host": e.BootstrapHost}
	if kv, err := config.ParseKVAddress(e.KVAddress); err == nil {
		hosts["kv_address"] = kv.Host
	}
	if u, err := url.Parse(e.URL); err == nil {
		hosts["url"] = u.Hostname()
	}
	if host, _, err := net.SplitHostPort(e.SideChannel); err == nil {
		hosts["side_channel"] = host
	}
	for key, address := range map[string]string{"kv_events": e.KVEvents, "kv_replay": e.KVReplay} {
		if rest, found := strings.CutPrefix(address, "tcp://"); found {
			hosts[key], _, _ = net.SplitHostPort(rest)
		}
	}
	for entry := range strings.SplitSeq(e.KVHosts, ",") {
		if entry = strings.TrimSpace(entry); entry != "" && !a.host(entry) { // kv_hosts cannot contain networks
			return errors.New("a host of kv_hosts is not in discovery.allow")
		}
	}
	for _, key := range []string{"url", "bootstrap_host", "kv_address", "side_channel", "kv_events", "kv_replay"} {
		host, set := hosts[key]
		if set && (host != "" || key == "url") && !a.host(host) {
			return fmt.Errorf("the host of %s is not in discovery.allow", key)
		}
	}
	return nil
}

// host reports whether a host is allowed. Names are not resolved: a name must be listed
// itself.
func (a allowList) host(host string) bool {
	if ip, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		ip = ip.Unmap().WithZone("")
		return slices.ContainsFunc(a.networks, func(n netip.Prefix) bool { return n.Contains(ip) })
	}
	host = canonical(host)
	return slices.ContainsFunc(a.names, func(name string) bool {
		return host == name || strings.HasPrefix(name, ".") && len(host) > len(name) && strings.HasSuffix(host, name)
	})
}

// canonical returns a host name in lower case without the final dot.
func canonical(name string) string { return strings.TrimSuffix(strings.ToLower(name), ".") }
