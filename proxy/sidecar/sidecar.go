// Package sidecar implements the additional steps of a proxy beside one engine: the coordination
// policies, which say which phases run on that engine and which engines may take the others, and
// the headers by which a gateway selects engines itself.
//
// The decisions behind this package are in docs/design/gateway.md.
package sidecar

import (
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Sidecar is the part of the configuration that makes a proxy a sidecar. A reload of the
// configuration replaces it; operators may change the order of the policies. Safe for
// concurrent use.
type Sidecar struct {
	cfg       config.Sidecar
	registry  *engine.Registry
	local     string         // name of the local engine
	callers   []netip.Prefix // whose headers are read; nil: those of every client
	order     atomic.Pointer[[]string]
	addresses directory
}

// New returns the sidecar of a configuration, nil for one without. It returns old, with
// the order that operators have set, if the configuration of the sidecar is the same.
func New(cfg *config.Config, registry *engine.Registry, old *Sidecar) *Sidecar {
	if cfg.Sidecar.Local == "" {
		return nil
	}
	local, _ := cfg.LocalEngine()
	if old != nil && old.local == local && old.same(cfg.Sidecar) {
		return old
	}
	sc := &Sidecar{cfg: cfg.Sidecar, registry: registry, local: local, callers: cfg.Sidecar.Networks()}
	sc.ResetOrder()
	return sc
}

func (sc *Sidecar) same(o config.Sidecar) bool {
	mine := sc.cfg
	if !slices.Equal(mine.Policies, o.Policies) || !slices.Equal(mine.Callers, o.Callers) {
		return false
	}
	mine.Policies, mine.Callers, o.Policies, o.Callers = nil, nil, nil, nil
	return mine.Local == o.Local && mine.Role == o.Role && mine.Connector == o.Connector && mine.Header == o.Header &&
		mine.EncoderHeader == o.EncoderHeader && mine.PolicyHeader == o.PolicyHeader && mine.ProfileHeader == o.ProfileHeader && mine.Picker == o.Picker
}

// Config returns the configuration of the sidecar.
func (sc *Sidecar) Config() config.Sidecar { return sc.cfg }

// LocalName returns the name of the local engine.
func (sc *Sidecar) LocalName() string { return sc.local }

// Local returns the local engine, nil while it is being replaced.
func (sc *Sidecar) Local() *engine.Instance { return sc.localIn(sc.registry.Snapshot()) }

func (sc *Sidecar) localIn(s *engine.Snapshot) *engine.Instance { return s.Instance(sc.local) }

// Order returns the coordination policies in the order in which they are tried. The
// caller must not change it.
func (sc *Sidecar) Order() []string { return *sc.order.Load() }

// SetOrder makes later requests try these coordination policies in this order, and no others. It
// keeps policies. The error names the invalid policies and the reason.
func (sc *Sidecar) SetOrder(policies []string) error {
	if err := sc.cfg.CheckOrder(policies); err != nil {
		return err
	}
	sc.order.Store(&policies)
	return nil
}

// ResetOrder restores the order of the configuration.
func (sc *Sidecar) ResetOrder() {
	order := sc.cfg.Order()
	sc.order.Store(&order)
}

// Ready reports whether one request could be served now.
func (sc *Sidecar) Ready() bool {
	snapshot := sc.registry.Snapshot()
	local := sc.localIn(snapshot)
	if local == nil || local.State() != engine.Ready {
		return false
	}
	hasPeer := func(role abi.Role) bool {
		return slices.ContainsFunc(snapshot.Instances, func(i *engine.Instance) bool {
			return i.State() == engine.Ready && isPeer(local, i, role)
		})
	}
	for _, name := range sc.Order() {
		switch name {
		case config.CoordinateLocal:
			if servesWhole(local) {
				return true
			}
		case config.CoordinatePrefillNamed, config.CoordinatePrefillPlaced:
			if hasPeer(abi.RolePrefill) {
				return true
			}
		default:
			if hasPeer(abi.RoleDecode) {
				return true
			}
		}
	}
	return false
}

// Strip removes the sidecar's own header lines from those that legs carry, whether the
// sidecar has read them or not.
func (sc *Sidecar) Strip(fields []upstream.Field) []upstream.Field {
	for _, name := range [...]string{sc.cfg.Header, sc.cfg.EncoderHeader, sc.cfg.PolicyHeader, sc.cfg.ProfileHeader} {
		if name != "" {
			fields = downstream.Without(fields, name)
		}
	}
	return fields
}

// servesWhole reports whether an engine answers a request alone.
func servesWhole(i *engine.Instance) bool {
	return i.Role == abi.RoleBoth || i.Role&connector.Of(i).AggregatesOn() != 0
}

// isPeer reports whether i may take the phase of that role for the local engine.
func isPeer(local, i *engine.Instance, role abi.Role) bool {
	return i != local && i.Role&role != 0 && i.Spec.Connector == local.Spec.Connector
}
