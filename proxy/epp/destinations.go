package epp

import (
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// destinations knows the addresses by which gateways reach the engines. Safe for concurrent
// use.
type destinations struct {
	registry *engine.Registry
	log      *slog.Logger
	current  atomic.Pointer[addresses]
	warned   sync.Map // ids of the engines without an address of which the log tells
}

// addresses has the engines of one snapshot by address.
type addresses struct {
	of  *engine.Snapshot
	by  map[netip.AddrPort][]*engine.Instance
	all []*engine.Instance // engines that gateways can reach; nil: all engines
}

// now returns the addresses of the present snapshot.
func (d *destinations) now() *addresses {
	s := d.registry.Snapshot()
	if a := d.current.Load(); a != nil && a.of == s {
		return a
	}
	a := &addresses{of: s, by: make(map[netip.AddrPort][]*engine.Instance), all: []*engine.Instance{}}
	for _, i := range s.Instances {
		address, ok := i.Spec.GatewayEndpoint()
		if !ok {
			d.warn(i)
			continue
		}
		a.by[address] = append(a.by[address], i)
		a.all = append(a.all, i)
	}
	if len(a.all) == len(s.Instances) {
		a.all = nil
	}
	d.current.Store(a)
	return a
}

// warn logs, once for each engine, that gateways cannot reach it.
func (d *destinations) warn(i *engine.Instance) {
	if i.Role&abi.RoleDecode == 0 { // a sidecar may look up its name
		return
	}
	if _, warned := d.warned.LoadOrStore(i.ID, true); !warned {
		d.log.Warn("gateways get no requests for this engine: the host of its URL is not an IP address (engine.endpoint names one)", "engine", i.Spec.Name)
	}
}

// at returns the engines of an endpoint.
func (a *addresses) at(endpoint netip.AddrPort) []*engine.Instance {
	return a.by[netip.AddrPortFrom(endpoint.Addr().Unmap(), endpoint.Port())]
}

// at returns the engines of an endpoint that a gateway names; none if it is unknown.
func (d *destinations) at(endpoint string) []*engine.Instance {
	at, err := netip.ParseAddrPort(endpoint)
	if err != nil {
		return nil
	}
	return d.now().at(at)
}

// within returns the engines that a request may use. subset lists the allowed destinations;
// limited is false if all are allowed.
func (d *destinations) within(subset []string, limited bool) coordinator.Within {
	a := d.now()
	if !limited {
		return coordinator.Within{Decode: a.all, Whole: a.all}
	}
	list := []*engine.Instance{}
	for _, text := range subset {
		if at, err := netip.ParseAddrPort(text); err == nil {
			list = append(list, a.at(at)...)
		} else if ip, err := netip.ParseAddr(text); err == nil {
			for address, engines := range a.by {
				if address.Addr() == ip.Unmap() {
					list = append(list, engines...)
				}
			}
		}
	}
	return coordinator.Within{Prefill: list, Decode: list, Whole: list}
}
