package engine

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// Owns reports whether host, an address or a name without port, is one at which
// the instance is known to be: that of its URL, or what that name stands for, one
// that is configured, or that it registered. What an engine says of itself is not
// enough, because its peers will call what it names. peer is who would call:
// two engines on one host may reach each other over the loopback.
func (i *Instance) Owns(host string, peer *Instance) bool {
	if host == "" {
		return false
	}
	if strings.EqualFold(host, i.Host) || host == i.Facts().KVAddress.Host || host == i.Spec.BootstrapHost {
		return true
	}
	if side, _ := i.Spec.SideChannelOf(0); side == host {
		return true
	}
	ip, err := netip.ParseAddr(host)
	ip = ip.Unmap()
	if ip.IsLoopback() || strings.EqualFold(host, "localhost") {
		if peer != nil && peer.Host == i.Host || i.local() {
			return true
		}
	}
	if err == nil && slices.Contains(i.Facts().Addresses, ip) {
		return true
	}
	return i.kvHosts.Contains(host, ip)
}

// local reports whether the instance is called over the loopback.
func (i *Instance) local() bool {
	if strings.EqualFold(i.Host, "localhost") {
		return true
	}
	ip, err := netip.ParseAddr(i.Host)
	return err == nil && ip.Unmap().IsLoopback()
}

// addresses is what the host of the instance's URL stands for; what it did before
// where that cannot be found out.
func (p *prober) addresses(ctx context.Context, h *config.Health) []netip.Addr {
	var before []netip.Addr
	if old := p.i.facts.Load(); old != nil {
		before = old.Addresses
	}
	if p.r.o.Resolve == nil || !p.i.pairs() {
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
