package sidecar

import (
	"slices"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// Check checks the parsed body. If the caller coordinates the phases itself, every host
// in the transfer parameters must belong to an engine of the other phase: the local
// engine would connect to it.
func (r *Route) Check() error {
	if r.profile == "" {
		return nil
	}
	// Decode calls prefill, prefill may call decode, and an encoder may be called by any.
	instances := slices.Clone(r.sc.registry.Snapshot().Instances)
	peer := map[string]abi.Role{config.ProfileDecode: abi.RolePrefill | abi.RoleEncode, config.ProfilePrefill: abi.RoleDecode | abi.RoleEncode}[r.profile]
	instances = slices.DeleteFunc(instances, func(i *engine.Instance) bool { return peer != 0 && i.Role&peer == 0 })
	for key, raw := range r.Body.Members {
		if !connector.PDMember(key, raw) {
			continue
		}
		if !connector.Hosts(key, raw, func(host string) bool { return hasHost(instances, host) }) {
			return badHeader(r.sc.cfg.ProfileHeader, 403, "does not allow '"+key+"' to name a host that is no engine of the other phase")
		}
	}
	return nil
}

// hasHost reports whether one of the instances has that host.
func hasHost(instances []*engine.Instance, host string) bool {
	if host == "" {
		return false
	}
	host = canonicalHost(host)
	return slices.ContainsFunc(instances, func(i *engine.Instance) bool {
		return canonicalHost(i.Host) == host || canonicalHost(i.Facts().KVAddress.Host) == host
	})
}
