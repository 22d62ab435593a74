package proxy

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"

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
		var value any
		if json.Unmarshal(raw, &value) != nil || foreign(instances, key, value) {
			return badHeader(x.side.sc.cfg.ProfileHeader, 403, "goes with '"+key+"', which names a host that is none of the engines for that")
		}
	}
	return nil
}

// foreign reports whether a value, or one inside it, is a host that is none of
// the instances': a text under a key that is about hosts, or one that can only
// be an address.
func foreign(instances []*engine.Instance, key string, value any) bool {
	switch v := value.(type) {
	case string:
		if v == "" || !aboutHosts(key) && !isAddress(v) {
			return false
		}
		host := hostOf(v)
		return !slices.ContainsFunc(instances, func(i *engine.Instance) bool {
			return canonicalHost(i.Host) == host || canonicalHost(i.Facts().KVAddress.Host) == host
		})
	case float64:
		return aboutHosts(key) // an address may be a number
	case []any:
		return slices.ContainsFunc(v, func(e any) bool { return foreign(instances, key, e) })
	case map[string]any:
		for k, e := range v {
			if foreign(instances, k, e) {
				return true
			}
		}
	}
	return false
}

// aboutHosts reports whether a member of that name holds hosts.
func aboutHosts(key string) bool {
	key = strings.ToLower(key)
	for _, word := range [...]string{"host", "addr", "endpoint", "url", "uri"} {
		if strings.Contains(key, word) {
			return true
		}
	}
	return key == "ip" || strings.HasSuffix(key, "_ip")
}

// isAddress reports whether a text is an address wherever it stands.
func isAddress(text string) bool {
	if _, err := netip.ParseAddr(text); err == nil {
		return true
	}
	_, err := netip.ParseAddrPort(text)
	return err == nil || strings.Contains(text, "://")
}
