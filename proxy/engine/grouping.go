package engine

import "github.com/pdproxy/pdproxy/abi"

// grouping sorts the instances of one model into groups within which every
// prefill may be paired with every decode: the same connector, and facts that
// the connector calls compatible, whichever way round. An instance joins the
// first group where it fits all members; one that tells nothing of itself fits
// any. Instances whose connector has no pairs are of group 0.
type grouping struct {
	groups []group
}

type group struct {
	connector string
	members   []*Facts // one for all instances that tell the same
}

// factKey is what two instances may differ in when they are paired.
type factKey struct {
	version, wire, kvType         string
	dpSize, bootstrapPort, pageSz int
	tpSize                        int
	followsRoom                   bool
}

func (f *Facts) key() factKey {
	return factKey{f.Version, f.Wire, f.KVCacheType, f.DPSize, f.BootstrapPort, f.PageSize, f.TPSize, f.FollowsRoom}
}

// group returns the number of i's group, from 1, and makes i a member.
func (g *grouping) group(i *Instance) uint32 {
	if !i.pairs() {
		return 0
	}
	facts := i.Facts()
	for n := range g.groups {
		if g.groups[n].join(i, facts) {
			return uint32(n + 1)
		}
	}
	g.groups = append(g.groups, group{connector: i.Spec.Connector, members: []*Facts{facts}})
	return uint32(len(g.groups))
}

// join makes i with its facts a member if it fits, and reports whether it does.
func (g *group) join(i *Instance, facts *Facts) bool {
	if g.connector != i.Spec.Connector {
		return false
	}
	for _, o := range g.members {
		if o.key() == facts.key() {
			return true
		}
	}
	for _, o := range g.members {
		if i.protocol.Compatible(o, facts) != nil || i.protocol.Compatible(facts, o) != nil {
			return false
		}
	}
	g.members = append(g.members, facts)
	return true
}

// pairs reports whether i can take one leg of two.
func (i *Instance) pairs() bool {
	return i.Flow != abi.FlowAggregated && i.Flow != abi.FlowNone && (i.Role != abi.RoleBoth || i.protocol.BothPairs())
}

// unpairable reports why a prefill leg on p cannot be followed by a decode leg
// on d, or the other way round; nil where a role excludes it.
func unpairable(p, d *Instance) error {
	var err error
	if p.Role&abi.RolePrefill != 0 && d.Role&abi.RoleDecode != 0 {
		err = p.protocol.Compatible(p.Facts(), d.Facts())
	}
	if err == nil && d.Role&abi.RolePrefill != 0 && p.Role&abi.RoleDecode != 0 {
		err = p.protocol.Compatible(d.Facts(), p.Facts())
	}
	return err
}
