package engine

import (
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// Snapshot is the registry's state at one moment. It is immutable except for the
// atomics of its instances, and read without a lock.
type Snapshot struct {
	// Instances holds every instance by age, including draining ones. While one drains,
	// another may already have its name.
	Instances []*Instance
	// Unlearned: there is an instance whose models are not known yet.
	Unlearned bool
	// Encoders: a pool has encoders, ready or not.
	Encoders bool

	known   known
	expects bool        // a list of engines has not arrived
	wakes   bool        // requests wake engines
	unasked []*Instance // whose first probe had not ended when the snapshot was made
	pools   map[string]*Pool
	local   int      // pools that no [[remote]] serves
	models  []string // models with an instance that computes prompts or answers, sorted
}

// Snapshot returns the present state; never nil.
func (r *Registry) Snapshot() *Snapshot { return r.snap.Load() }

// Pool returns the pool of a model. ok is false if no known instance serves the model.
func (s *Snapshot) Pool(model string) (p *Pool, ok bool) {
	p, ok = s.pools[model]
	return p, ok
}

// Only returns the number of pools of engines, and the pool if there is exactly one,
// otherwise nil.
func (s *Snapshot) Only() (p *Pool, count int) {
	if s.local != 1 {
		return nil, s.local
	}
	for _, one := range s.pools {
		if !one.Remote {
			p = one
		}
	}
	return p, 1
}

// Knows reports whether an instance serves the model, or has served it since this
// registry was made, or whether the configuration names it.
func (s *Snapshot) Knows(model string) bool {
	if _, ok := s.pools[model]; ok {
		return true
	}
	_, ok := s.known.roles[model]
	return ok
}

// Known lists the models of Knows, except those that only encoders serve, sorted. The
// caller must not change the slice.
func (s *Snapshot) Known() []string { return s.known.models }

// Roles lists the roles that engines of a known model have or had.
func (s *Snapshot) Roles(model string) (roles []abi.Role) {
	bits := s.known.roles[model]
	for _, role := range []abi.Role{abi.RolePrefill, abi.RoleDecode, abi.RoleBoth} {
		if bits&(1<<role) != 0 {
			roles = append(roles, role)
		}
	}
	return roles
}

// Models lists the models of all instances except encoders and remotes, sorted, whether the instances
// are ready or not. The caller must not change the slice.
func (s *Snapshot) Models() []string { return s.models }

// Ready reports whether some model could be served now, or after its engines have been woken.
func (s *Snapshot) Ready() bool {
	for _, p := range s.pools {
		if p.Plan.Both > 0 || p.Plan.Prefill > 0 || s.wakes && len(p.Asleep) > 0 {
			return true
		}
	}
	return false
}

// Instance returns the instance of that name that is not draining, else a draining one,
// else nil.
func (s *Snapshot) Instance(name string) *Instance {
	var found *Instance
	for _, i := range s.Instances {
		if i.Spec.Name == name && (found == nil || i.State() != Draining) {
			found = i
		}
	}
	return found
}

// Peer returns a ready target of the given phase that could have been paired in t's
// place and is none of tried; the zero Target if there is none. It serves calls that
// any engine of a group can take.
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

// Row is one target of a pool, with those of its facts that do not change within a
// snapshot.
type Row struct {
	Target
	Facts abi.Candidate // loads are zero

	// Detail has the labels and the weight. Counts are not known.
	Detail abi.Detail
}

// Pool is the set of targets for one model. Group numbers are local to the pool: two
// targets of one group can be paired, two of different groups cannot.
type Pool struct {
	Model string
	// Base is the model whose LoRA adapter the pool serves: the first model of an engine is the base
	// of its adapters. Without an adapter, Base is Model, and Adapter is "".
	Base, Adapter string
	// Ready holds every ready target. Targets of a group are adjacent.
	Ready []Row
	// Both holds the targets of role both: they take aggregated legs.
	Both []Row
	// Paired holds the targets that have a partner on another instance, those of a
	// group adjacent. A row's roles contain only roles with a partner.
	Paired []Row
	// Groups holds the end index of each group in Paired.
	Groups []int
	// Encode lists the ready encoders. Encoders: there are encoders, ready or not. The
	// other lists do not contain encoders.
	Encode   []Row
	Encoders bool
	// Plan counts targets for the plan policy.
	Plan Counts
	// Configured counts, by role, the instances that serve or have served the model,
	// whatever their state.
	Configured Counts
	// Pairs: the connector of at least one target has two legs.
	Pairs bool
	// Asleep lists the targets that are ready and sleep. The other lists and counts do not contain
	// them.
	Asleep []Row
	// Remote: the instance is a [[remote]]. Only fallbacks name its model.
	Remote bool

	unready []Row // not ready, but they may hold blocks that a transfer will read
}

// Counts has one number for each use of a target: prefill of a pair, decode of a pair,
// both phases of an aggregated request.
type Counts struct{ Prefill, Decode, Both int32 }

// Group returns the group of a target that is ready, or that was ready and may still
// serve transfers.
func (p *Pool) Group(t Target) (group uint32, ok bool) {
	for _, rows := range [][]Row{p.Ready, p.unready} {
		for i := range rows {
			if rows[i].Target == t {
				return rows[i].Facts.Group, true
			}
		}
	}
	return 0, false
}

// newSnapshot builds the snapshot of the instances, which must be in order of age.
func newSnapshot(instances []*Instance, rules pairing) *Snapshot {
	s := &Snapshot{Instances: instances, pools: make(map[string]*Pool)}
	members := make(map[string][]*Instance)
	for _, i := range instances {
		models := i.Models()
		s.Unlearned = s.Unlearned || models == nil
		for _, m := range models {
			if strings.HasPrefix(m, config.RemotePrefix) && !i.IsRemote() {
				continue // no engine takes the requests of a remote
			}
			if of := members[m]; len(of) == 0 || of[len(of)-1] != i { // only once, even if it lists m twice
				members[m] = append(of, i)
			}
		}
	}
	for model, of := range members {
		p := newPool(model, of, rules)
		s.pools[model] = p
		s.Encoders = s.Encoders || p.Encoders
		if p.Remote = of[0].IsRemote(); p.Remote {
			continue
		}
		s.local++
		if slices.ContainsFunc(of, func(i *Instance) bool { return i.Role != abi.RoleEncode }) {
			s.models = append(s.models, model)
		}
	}
	slices.Sort(s.models)
	return s
}

// newPool builds the pool of the instances that serve model.
func newPool(model string, of []*Instance, rules pairing) *Pool {
	p := &Pool{Model: model, Base: model}
	all := of
	if of = slices.DeleteFunc(slices.Clone(of), func(i *Instance) bool { return i.Role == abi.RoleEncode }); len(of) < len(all) {
		p.Encoders = true
		for _, i := range all {
			if i.Role == abi.RoleEncode && i.State() == Ready {
				p.Encode = appendRanks(p.Encode, i, 0)
			}
		}
	}
	g := grouping{pairing: rules, all: of}
	for _, i := range of {
		p.Configured.count(i.Role, 1)
		p.Pairs = p.Pairs || i.pairs()
		if i.State() == Ready {
			p.Ready = appendRanks(p.Ready, i, g.group(i))
		}
	}
	// Unready instances come last, so that they do not influence the groups of the
	// others.
	for _, i := range of {
		if s := i.State(); s == Draining || s == Unhealthy {
			p.unready = appendRanks(p.unready, i, g.group(i))
		}
	}
	p.sleep()
	slices.SortStableFunc(p.Ready, func(a, b Row) int { return int(a.Facts.Group) - int(b.Facts.Group) })
	for _, r := range p.Ready {
		if r.Facts.Roles == abi.RoleBoth {
			p.Both = append(p.Both, r)
		}
	}
	if len(p.Ready) > 0 {
		if models := p.Ready[0].Models(); len(models) > 0 && models[0] != model {
			p.Base, p.Adapter = models[0], model
		}
	}
	p.pair()
	p.Plan.Both = int32(len(p.Both))
	return p
}

// sleep moves the rows of sleeping ranks from Ready to unready.
func (p *Pool) sleep() {
	p.Ready = slices.DeleteFunc(p.Ready, func(r Row) bool {
		asleep := r.Asleep(r.Rank)
		if asleep {
			p.Asleep = append(p.Asleep, r)
			p.unready = append(p.unready, r)
		}
		return asleep
	})
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
			if !decode.other(r) {
				r.Facts.Roles &^= abi.RolePrefill
			}
			if !prefill.other(r) {
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

// holders records which instances serve a phase: none, one, or several.
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

// other reports whether there is one on another instance than r's.
func (h *holders) other(r Row) bool {
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
	detail := i.Detail()
	for rank := range i.ranks() {
		rows = append(rows, Row{
			Target: Target{Instance: i, Rank: rank}, Detail: detail,
			Facts: abi.Candidate{Roles: i.Role, Group: group, Instance: i.ID, Rank: int32(rank)},
		})
	}
	return rows
}
