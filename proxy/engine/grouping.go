package engine

import "github.com/pdproxy/pdproxy/abi"

// grouping sorts the instances of one model into groups within which every
// prefill may be paired with every decode: the same connector, and facts that
// the connector calls compatible. An instance joins the first group where it
// fits every member that it would be paired with, and has a possible partner in
// common with every other; one that tells nothing of itself fits any. Instances
// whose connector has no pairs are of group 0.
type grouping struct {
	lax    bool        // pairs.allow_incompatible
	all    []*Instance // the candidates for a partner in common
	groups []group
}

type group struct {
	connector string
	members   []*Instance // one for all that tell the same and have the same role
}

// factKey is what two instances may differ in when they are paired.
type factKey struct {
	version, wire, kvType         string
	dpSize, bootstrapPort, pageSz int
	tpSize, ppSize, cpSize        int
	transfer                      string
	followsRoom                   bool
}

func (f *Facts) key() factKey {
	return factKey{f.Version, f.Wire, f.KVCacheType, f.DPSize, f.BootstrapPort, f.PageSize, f.TPSize, f.PPSize, f.CPSize, f.Transfer, f.FollowsRoom}
}

// group returns the number of i's group, from 1, and makes i a member.
func (g *grouping) group(i *Instance) uint32 {
	if !i.pairs() {
		return 0
	}
	for n := range g.groups {
		if g.join(&g.groups[n], i) {
			return uint32(n + 1)
		}
	}
	g.groups = append(g.groups, group{connector: i.Spec.Connector, members: []*Instance{i}})
	return uint32(len(g.groups))
}

// join makes i a member of to if it fits, and reports whether it does.
func (g *grouping) join(to *group, i *Instance) bool {
	if to.connector != i.Spec.Connector {
		return false
	}
	if g.lax {
		return true
	}
	for _, o := range to.members {
		if o.Role == i.Role && o.Facts().key() == i.Facts().key() {
			return true
		}
	}
	for _, o := range to.members {
		if !g.fits(i, o) {
			return false
		}
	}
	to.members = append(to.members, i)
	return true
}

// fits reports whether a and b, of one connector, may be of one group.
func (g *grouping) fits(a, b *Instance) bool {
	switch {
	case a.leads(b) || b.leads(a):
		return unpairable(a, b) == nil
	case a.protocol.Compatible(a.Facts(), b.Facts()) == nil && a.protocol.Compatible(b.Facts(), a.Facts()) == nil:
		return true
	}
	for _, o := range g.all {
		if o.Spec.Connector == a.Spec.Connector && (a.leads(o) || o.leads(a)) && unpairable(a, o) == nil && unpairable(b, o) == nil {
			return true
		}
	}
	return false
}

// pairs reports whether i can take one leg of two.
func (i *Instance) pairs() bool {
	return i.Flow != abi.FlowAggregated && i.Flow != abi.FlowNone && (i.Role != abi.RoleBoth || i.protocol.BothPairs())
}

// leads reports whether a prefill leg on i may be followed by a decode leg on d,
// by their roles.
func (i *Instance) leads(d *Instance) bool {
	return i.Role&abi.RolePrefill != 0 && d.Role&abi.RoleDecode != 0
}

// unpairable reports why a prefill leg on p cannot be followed by a decode leg
// on d, or the other way round; nil where a role excludes it.
func unpairable(p, d *Instance) error {
	var err error
	if p.leads(d) {
		err = p.protocol.Compatible(p.Facts(), d.Facts())
	}
	if err == nil && d.leads(p) {
		err = p.protocol.Compatible(d.Facts(), p.Facts())
	}
	return err
}
