package engine

import (
	"maps"
	"slices"

	"github.com/pdproxy/pdproxy/abi"
)

// Bounds of the models that a registry stores: an engine chooses the names of its models.
const (
	maxKnown     = 1024
	maxKnownText = 1 << 20 // bytes of their names
)

// known holds the models that a registry has known in its life. The registry's mu guards
// it.
type known struct {
	models []string            // sorted; replaced, never changed
	roles  map[string]roleBits // by model; replaced, never changed
	text   int                 // bytes of the models
}

// roleBits has the bit 1<<role of each role that an engine of the model had.
type roleBits uint8

// add adds models whose engines have those roles. Models beyond maxKnown and maxKnownText are
// removed when their engines leave.
func (k *known) add(models map[string]roleBits) {
	var next map[string]roleBits
	for m, roles := range models {
		old, has := k.roles[m]
		if m == "" || has && old|roles == old {
			continue
		}
		if next == nil {
			next = maps.Clone(k.roles)
			if next == nil {
				next = make(map[string]roleBits)
			}
		}
		if !has {
			if len(next) == maxKnown || k.text+len(m) > maxKnownText {
				continue
			}
			k.text += len(m)
		}
		next[m] = old | roles
	}
	if next != nil {
		k.roles, k.models = next, slices.Sorted(maps.Keys(next))
	}
}

// Known is a model that a registry has known, and the roles of its engines as bits 1<<role.
type Known struct {
	Model string
	Roles uint8
}

// Know adds models to those that the registry knows: models of the configuration whose
// engines may come later.
func (r *Registry) Know(list []Known) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.known.add(bitsOf(list))
	r.publish()
}

func bitsOf(list []Known) map[string]roleBits {
	models := make(map[string]roleBits)
	for _, k := range list {
		models[k.Model] |= roleBits(k.Roles)
	}
	return models
}

// Changed returns a channel that is closed when the registry has a newer snapshot than at
// the call.
func (r *Registry) Changed() <-chan struct{} { return *r.newer.Load() }

// served returns the models of the instances, except encoders and remotes, with their
// roles.
func served(instances []*Instance) map[string]roleBits {
	models := make(map[string]roleBits)
	for _, i := range instances {
		if i.Role == abi.RoleEncode || i.IsRemote() {
			continue
		}
		for _, m := range i.Models() {
			models[m] |= 1 << i.Role
		}
	}
	return models
}
