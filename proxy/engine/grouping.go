package engine

import (
	"errors"
	"slices"

	"github.com/pdproxy/pdproxy/abi"
)

// grouping sorts the instances of one model into groups. Within a group every prefill
// may be paired with every decode: they have the same connector, and facts that the
// connector calls compatible. An instance joins the first group in which it is
// compatible with every possible partner, and has a common possible partner with every
// other member. An instance without facts is compatible with all. Instances whose
// connector has no pairs are in group 0.
//
// All members of a group have the same values of the labels in pairing.same. An instance that
// lacks one of these labels is alone in a group.
type grouping struct {
	pairing
	all    []*Instance // the candidates for a common partner
	groups []group
}

// pairing is the configuration of pairs.
type pairing struct {
	lax  bool     // pairs.allow_incompatible
	same []string // pairs.same_labels
}

type group struct {
	connector string
	labels    string      // see pairing.labels
	members   []*Instance // one representative for all instances with the same facts and role
}

// factKey holds the facts that decide whether two instances can be paired.
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

// group returns the number of i's group, from 1, and adds i to it.
func (g *grouping) group(i *Instance) uint32 {
	if !i.pairs() {
		return 0
	}
	labels, ok := g.labels(i)
	for n := range g.groups {
		if ok && g.groups[n].labels == labels && g.join(&g.groups[n], i) {
			return uint32(n + 1)
		}
	}
	g.groups = append(g.groups, group{connector: i.Spec.Connector, labels: labels, members: []*Instance{i}})
	return uint32(len(g.groups))
}

// labels returns the values of the labels that two legs must share, "" if there are none. ok is
// false if i lacks one of them.
func (p *pairing) labels(i *Instance) (values string, ok bool) {
	if len(p.same) == 0 {
		return "", true
	}
	labels := i.Spec.Labels.Map()
	for _, name := range p.same {
		value := labels[name]
		if value == "" {
			return "", false
		}
		values += value + "\n" // no value has this byte
	}
	return values, true
}

// join adds i to the group if it fits, and reports whether it did.
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

// fits reports whether a and b, which have the same connector, may be in one group.
func (g *grouping) fits(a, b *Instance) bool {
	switch {
	case a.leads(b) || b.leads(a):
		return unpairable(a, b) == nil
	case a.protocol.Compatible(a.Facts(), b.Facts()) == nil && a.protocol.Compatible(b.Facts(), a.Facts()) == nil:
		return true
	}
	labels, _ := g.labels(a)
	for _, o := range g.all {
		if other, ok := g.labels(o); !ok || other != labels {
			continue
		}
		if o.Spec.Connector == a.Spec.Connector && (a.leads(o) || o.leads(a)) && unpairable(a, o) == nil && unpairable(b, o) == nil {
			return true
		}
	}
	return false
}

// ErrLabels is why engines with other labels are no pair.
var ErrLabels = errors.New("the labels of pairs.same_labels differ")

// Misfit returns why prefill on p and decode on d cannot be a pair, or nil. ok is false if the roles,
// models or connectors of the two exclude a pair anyway.
func (r *Registry) Misfit(p, d *Instance) (reason error, ok bool) {
	rules := r.pairing.Load()
	if p == d || p.Spec.Connector != d.Spec.Connector || !p.leads(d) || !p.pairs() || !d.pairs() ||
		!slices.ContainsFunc(p.Models(), func(m string) bool { return slices.Contains(d.Models(), m) }) {
		return nil, false
	}
	mine, known := rules.labels(p)
	if theirs, other := rules.labels(d); !known || !other || mine != theirs {
		return ErrLabels, true
	}
	if rules.lax {
		return nil, true
	}
	return p.protocol.Compatible(p.Facts(), d.Facts()), true
}

// pairs reports whether i can take one leg of a pair.
func (i *Instance) pairs() bool {
	return i.Flow != abi.FlowAggregated && i.Flow != abi.FlowNone && (i.Role != abi.RoleBoth || i.protocol.BothPairs())
}

// leads reports whether, by their roles, a prefill leg on i may be followed by a decode
// leg on d.
func (i *Instance) leads(d *Instance) bool {
	return i.Role&abi.RolePrefill != 0 && d.Role&abi.RoleDecode != 0
}

// unpairable returns why two legs on p and d are impossible, with prefill on p and decode
// on d or in the reverse direction. It does not check a direction that the roles exclude.
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
