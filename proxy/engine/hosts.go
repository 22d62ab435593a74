package engine

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// Owns reports whether host, an address or a name without port, is one at which the
// instance is known to be: the host of its URL, an address of that host, a configured
// host, or one that the instance registered. A host that only the engine's own answer
// names does not count, because its peers will connect to it. One exception: an
// instance of the configuration file without kv_hosts may name any host but the
// caller's own. peer is the instance that would connect. A loopback address reaches
// peer's own host, so it belongs to the instance only if both are on one host.
func (i *Instance) Owns(host string, peer *Instance) bool {
	if host == "" {
		return false
	}
	if host == i.Facts().KVAddress.Host || host == i.Spec.BootstrapHost {
		return true
	}
	if i.Spec.SideChannel != "" {
		if side, _ := i.Spec.SideChannelOf(0); side == host {
			return true
		}
	}
	ip, err := netip.ParseAddr(host)
	ip = ip.Unmap()
	if i.Spec.KVHosts != "" && i.kvHosts.Contains(host, ip) {
		return true
	}
	if ip.IsLoopback() || strings.EqualFold(host, "localhost") {
		// Two engines are on one host if their URLs name the same host, or if both name this machine.
		return peer != nil && (strings.EqualFold(i.Host, peer.Host) || i.local() && peer.on(i) || peer.local() && i.on(peer))
	}
	if i.trusted() && !ip.IsUnspecified() {
		return true
	}
	return strings.EqualFold(host, i.Host) || err == nil && slices.Contains(i.Facts().Addresses, ip)
}

// trusted reports whether the instance may name its own hosts: the operator wrote it
// into the configuration and listed no kv_hosts.
func (i *Instance) trusted() bool { return i.Source == SourceStatic && i.Spec.KVHosts == "" }

// OwnsPort reports whether port can be one of the instance's side channels. It returns
// true if they are not known. Each rank has its own port, counted from the configured
// or registered one.
func (i *Instance) OwnsPort(port int) bool {
	f := i.Facts()
	ranks := max(1, i.Spec.Ranks, f.DPSize) * max(1, i.Spec.TPSize, f.TPSize)
	side, known := 0, false
	if i.Spec.SideChannel != "" {
		_, side = i.Spec.SideChannelOf(0)
	}
	for _, first := range [...]int{side, f.KVAddress.Handshake, f.KVAddress.Notify} {
		if first == 0 {
			continue
		}
		if known = true; port >= first && port < first+ranks {
			return true
		}
	}
	return !known
}

// local reports whether the instance's URL names this machine by its loopback. Other
// loopback addresses do not count: they may be tunnels to other hosts.
func (i *Instance) local() bool {
	switch strings.ToLower(i.Host) {
	case "localhost", "127.0.0.1", "::1":
		return true
	}
	return false
}

// on reports whether the instance is on the machine of a local instance, whose
// addresses are all addresses of the machine.
func (i *Instance) on(local *Instance) bool {
	if i.local() {
		return true
	}
	at := i.Facts().Addresses
	return len(at) > 0 && !slices.ContainsFunc(at, func(ip netip.Addr) bool {
		return ip.IsLoopback() || !slices.Contains(local.Facts().Addresses, ip)
	})
}

// addresses resolves the host of the instance's URL, if the facts f or those of its peers may name a
// host. On a failure it returns the earlier addresses.
func (p *prober) addresses(ctx context.Context, h *config.Health, f *Facts) []netip.Addr {
	var before []netip.Addr
	if old := p.i.facts.Load(); old != nil {
		before = old.Addresses
	}
	if p.r.o.Resolve == nil || !p.i.pairs() && len(f.KVEvents.Ranks) == 0 {
		return before
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(h.Timeout))
	defer cancel()
	now, err := p.r.o.Resolve(ctx, p.i.Host)
	if err != nil {
		return before
	}
	return now
}
