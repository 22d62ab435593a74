package engine

import (
	"slices"

	"github.com/pdproxy/pdproxy/abi"
)

// Snapshot is what the registry knew at one moment. It is immutable but for the
// atomics of its instances, and read without a lock.
type Snapshot struct {
	// Instances holds every instance by age, draining ones included. While one
	// drains, another may already have its name.
	Instances []*Instance
	// Unlearned says that an instance has yet to tell which models it serves.
	Unlearned bool

	pools  map[string]*Pool
	models []string // of the pools that have a ready target, sorted
}

// Pool returns the pool of a model; ok is false for a model that no instance is
// known to serve.
func (s *Snapshot) Pool(model string) (p *Pool, ok bool) {
	p, ok = s.pools[model]
	return p, ok
}

// Only returns the pool when there is exactly one, else nil, and how many there
// are.
func (s *Snapshot) Only() (p *Pool, count int) {
	if len(s.pools) == 1 {
		for _, p = range s.pools {
		}
	}
	return p, len(s.pools)
}

// Models lists the models of the instances that are ready, sorted. The caller
// must not change the slice.
func (s *Snapshot) Models() []string { return s.models }

// Ready reports whether some model could be served now.
func (s *Snapshot) Ready() bool {
	for _, model := range s.models {
		if p := s.pools[model]; p.Plan.Both > 0 || p.Plan.Prefill > 0 {
			return true
		}
	}
	return false
}

// Instance returns the instance of that name that does not drain, else one that
// does, else nil.
func (s *Snapshot) Instance(name string) *Instance {
	var found *Instance
	for _, i := range s.Instances {
		if i.Spec.Name == name && (found == nil || i.State() != Draining) {
			found = i
		}
	}
	return found
}

// Peer returns a ready target of the given phase that could have been paired in
// t's place, none of those tried, for calls that any engine of a group can
// take; the zero Target when there is none.
func (s *Snapshot) Peer(t Target, phase abi.Phase, tried []Target) Target {
	role := abi.RolePrefill
	if phase == abi.Decode {
		role = abi.RoleDecode
	}
	for _, model := range t.Models() {
		p := s.pools[model]
		if p == nil {
			continue
		}
		group, known := p.Group(t)
		for _, r := range p.Ready {
			same := r.Facts.Group == group
			if !known {
				same = r.Target.Spec.Connector == t.Spec.Connector
			}
			if same && r.Facts.Roles&role != 0 && !slices.Contains(tried, r.Target) {
				return r.Target
			}
		}
	}
	return Target{}
}

// Row is one target of a pool, with the facts of it that do not change within
// a snapshot.
type Row struct {
	Target
	Facts abi.Candidate // loads are zero
}

// Pool is what can be placed for one model. Group numbers are its own: two
// targets of one group can be paired, two of different groups cannot.
type Pool struct {
	Model string
	// Ready holds every ready target, the targets of a group together.
	Ready []Row
	// Both holds those of role both: they take aggregated legs.
	Both []Row
	// Paired holds those that have a partner on another instance, a group
	// together. A role without a partner is not among the roles of a row.
	Paired []Row
	// Groups says where each group of Paired ends.
	Groups []int
	// Encode holds the ready encoders; Encoders says that there are any, ready or
	// not. They are in none of the above.
	Encode   []Row
	Encoders bool
	// Plan counts targets for the plan policy.
	Plan Counts
	// Configured counts the instances of each role that serve or did serve the
	// model, whatever their state.
	Configured Counts
	// Pairs says that the connector of some of them has two legs.
	Pairs bool

	away []Row // not ready, but they may hold blocks that a transfer is to read
}

// Counts is a number for each way to be used: in a pair as prefill, in a pair as
// decode, for both phases of an aggregated request.
type Counts struct{ Prefill, Decode, Both int32 }

// Group returns the group of a target that is ready, or was and may still serve
// transfers.
func (p *Pool) Group(t Target) (group uint32, ok bool) {
	for _, rows := range [][]Row{p.Ready, p.away} {
		for i := range rows {
			if rows[i].Target == t {
				return rows[i].Facts.Group, true
			}
		}
	}
	return 0, false
}

// newSnapshot builds the snapshot of the instances, which are in order of age.
// lax pairs also those whose facts exclude it.
func newSnapshot(instances []*Instance, lax bool) *Snapshot {
	s := &Snapshot{Instances: instances, pools: make(map[string]*Pool)}
	members := make(map[string][]*Instance)
	for _, i := range instances {
		models := i.Models()
		s.Unlearned = s.Unlearned || models == nil
		for _, m := range models {
			if of := members[m]; len(of) == 0 || of[len(of)-1] != i { // once, if it lists m twice
				members[m] = append(of, i)
			}
		}
	}
	for model, of := range members {
		p := newPool(model, of, lax)
		s.pools[model] = p
		if len(p.Ready) > 0 {
			s.models = append(s.models, model)
		}
	}
	slices.Sort(s.models)
	return s
}

// newPool builds the pool of the instances that serve model.
func newPool(model string, of []*Instance, lax bool) *Pool {
	p := &Pool{Model: model}
	all := of
	if of = slices.DeleteFunc(slices.Clone(of), func(i *Instance) bool { return i.Role == abi.RoleEncode }); len(of) < len(all) {
		p.Encoders = true
		for _, i := range all {
			if i.Role == abi.RoleEncode && i.State() == Ready {
				p.Encode = appendRanks(p.Encode, i, 0)
			}
		}
	}
	g := grouping{lax: lax, all: of}
	for _, i := range of {
		p.Configured.count(i.Role, 1)
		p.Pairs = p.Pairs || i.pairs()
		if i.State() == Ready {
			p.Ready = appendRanks(p.Ready, i, g.group(i))
		}
	}
	// Those away come last, so that they do not shape the groups of the rest.
	for _, i := range of {
		if s := i.State(); s == Draining || s == Unhealthy {
			p.away = appendRanks(p.away, i, g.group(i))
		}
	}
	slices.SortStableFunc(p.Ready, func(a, b Row) int { return int(a.Facts.Group) - int(b.Facts.Group) })
	for _, r := range p.Ready {
		if r.Facts.Roles == abi.RoleBoth {
			p.Both = append(p.Both, r)
		}
	}
	p.pair()
	p.Plan.Both = int32(len(p.Both))
	return p
}

// pair fills Paired, Groups and the counts of pairs.
func (p *Pool) pair() {
	for start, end := 0, 0; start < len(p.Ready); start = end {
		group := p.Ready[start].Facts.Group
		for end = start; end < len(p.Ready) && p.Ready[end].Facts.Group == group; end++ {
		}
		if group == 0 {
			continue
		}
		rows := p.Ready[start:end]
		var prefill, decode holders
		for _, r := range rows {
			prefill.add(r, abi.RolePrefill)
			decode.add(r, abi.RoleDecode)
		}
		for _, r := range rows {
			if !decode.besides(r) {
				r.Facts.Roles &^= abi.RolePrefill
			}
			if !prefill.besides(r) {
				r.Facts.Roles &^= abi.RoleDecode
			}
			if r.Facts.Roles != 0 {
				p.Paired = append(p.Paired, r)
				p.Plan.count(r.Facts.Roles&abi.RolePrefill, 1)
				p.Plan.count(r.Facts.Roles&abi.RoleDecode, 1)
			}
		}
		if n := len(p.Paired); n > 0 && (len(p.Groups) == 0 || p.Groups[len(p.Groups)-1] < n) {
			p.Groups = append(p.Groups, n)
		}
	}
}

// holders is the instances that serve a phase: none, one, or several.
type holders struct {
	first   *Instance
	several bool
}

func (h *holders) add(r Row, phase abi.Role) {
	switch {
	case r.Facts.Roles&phase == 0:
	case h.first == nil:
		h.first = r.Instance
	case h.first != r.Instance:
		h.several = true
	}
}

// besides reports whether there is one on another instance than r's.
func (h *holders) besides(r Row) bool {
	return h.several || h.first != nil && h.first != r.Instance
}

func (c *Counts) count(role abi.Role, n int32) {
	switch role {
	case abi.RolePrefill:
		c.Prefill += n
	case abi.RoleDecode:
		c.Decode += n
	case abi.RoleBoth:
		c.Both += n
	}
}

// appendRanks appends a row for each rank of i.
func appendRanks(rows []Row, i *Instance, group uint32) []Row {
	for rank := range i.ranks() {
		rows = append(rows, Row{
			Target: Target{Instance: i, Rank: rank},
			Facts:  abi.Candidate{Roles: i.Role, Group: group, Instance: i.ID, Rank: int32(rank)},
		})
	}
	return rows
}
