package proxy

import (
	"slices"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// checkParams refuses a phase of a caller that coordinates itself if what it
// tells the engine of the transfer names a host that is none of the engines that
// take the other phase: the engine would connect to it.
func (x *exchange) checkParams() error {
	if x.side.phase == "" {
		return nil
	}
	// Decode calls prefill, prefill may call decode, an encoder whoever comes.
	instances := slices.Clone(x.s.deps.Registry.Snapshot().Instances)
	peer := map[string]abi.Role{config.ProfileDecode: abi.RolePrefill | abi.RoleEncode, config.ProfilePrefill: abi.RoleDecode | abi.RoleEncode}[x.side.phase]
	instances = slices.DeleteFunc(instances, func(i *engine.Instance) bool { return peer != 0 && i.Role&peer == 0 })
	for key, raw := range x.req.Members {
		if !connector.PDMember(key, raw) {
			continue
		}
		if !connector.Hosts(key, raw, func(host string, _ int) bool { return knownHost(instances, host) }) {
			return badHeader(x.side.sc.cfg.ProfileHeader, 403, "goes with '"+key+"', which names a host that is none of the engines for that")
		}
	}
	return nil
}

// knownHost reports whether a host is that of one of the instances.
func knownHost(instances []*engine.Instance, host string) bool {
	if host == "" {
		return false
	}
	host = canonicalHost(host)
	return slices.ContainsFunc(instances, func(i *engine.Instance) bool {
		return canonicalHost(i.Host) == host || canonicalHost(i.Facts().KVAddress.Host) == host
	})
}
