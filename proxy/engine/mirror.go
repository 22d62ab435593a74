package engine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// mirroredEvery sets the weight of mirrored loads: they count in full for twice
// this time after the report, and less and less until six times this time.
const mirroredEvery = 2 * time.Second

// Mirror is a Registry without probes: its instances are those that another process's
// registry exports. Without an import the mirror stays unchanged, so that requests can
// continue with the last known state. An instance that is no longer exported drains, by
// its loads here, and leaves.
//
// The loads held here are this process's own. They are subtracted from the imported
// ones, so that a View is correct in both processes. Mirror is safe for concurrent use.
type Mirror struct {
	registry *Registry
	drainFor func() time.Duration

	mu      sync.Mutex                // serializes imports
	awaited []string                  // names of engines that the next imports must have; guarded by mu
	arrived func()                    // called when an import has them; guarded by mu
	refused map[uint32]bool           // numbers of instances that could not be created here; guarded by mu
	last    [Pairs + 1][]byte         // last loads and pairs; guarded by mu
	now     atomic.Pointer[numbering] // replaced, never changed
}

// numbering maps the instance numbers of one registry to the instances here.
type numbering struct {
	mark       uint64
	byNumber   map[uint32]*Instance
	byInstance map[*Instance]uint32
}

// NewMirror returns an empty mirror and starts nothing. It ignores OnState and the fields
// of o for probes and keys: the keys of instances are imported. drainFor bounds the time
// for which an instance may still have requests here after the other registry has removed
// it.
func NewMirror(o Options, drainFor func() time.Duration) *Mirror {
	o.APIKey, o.OnState = nil, nil
	r := New(o)
	m := &Mirror{registry: r, drainFor: drainFor}
	m.now.Store(new(numbering))
	m.arrived = r.Expect(FirstList)
	r.reports = newReports(&m.now)
	r.pairs.reports = r.reports
	return m
}

// Registry returns the registry with the mirror's instances. Its Run removes instances
// that have drained.
func (m *Mirror) Registry() *Registry { return m.registry }

// Await makes the registry expect the named engines, for at most FirstList: a new configuration may
// reach this process before the exporting one.
func (m *Mirror) Await(names []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.arrived
	m.awaited, m.arrived = names, m.registry.Expect(FirstList)
	before()
	m.noteArrived()
}

// noteArrived ends the expectation of Await if the registry has the engines; m.mu is held.
func (m *Mirror) noteArrived() {
	s := m.registry.Snapshot()
	if m.now.Load().mark != 0 && !slices.ContainsFunc(m.awaited, func(name string) bool { return s.Instance(name) == nil }) {
		m.arrived()
	}
}

// Number returns the number of i in the exporting registry; false if it has none.
func (m *Mirror) Number(i *Instance) (uint32, bool) {
	number, ok := m.now.Load().byInstance[i]
	return number, ok
}

// Instance returns the instance with that number, or nil.
func (m *Mirror) Instance(number uint32) *Instance { return m.now.Load().byNumber[number] }

// Import applies a part that Export has published, and does not keep value. If value is
// malformed it returns an error and changes nothing.
func (m *Mirror) Import(part Part, value []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if part > Pairs {
		return errors.New("import registry: unknown part")
	}
	if err := m.take(part, value); err != nil {
		return fmt.Errorf("import %s: %w", part, err)
	}
	if part != Members {
		m.last[part] = append(m.last[part][:0], value...)
		return nil
	}
	// Loads and pairs may have come first, with numbers that were not known yet.
	return errors.Join(m.take(Loads, m.last[Loads]), m.take(Pairs, m.last[Pairs]))
}

// take imports one part; m.mu is held.
func (m *Mirror) take(part Part, value []byte) error {
	switch {
	case part == Members:
		return m.importMembers(value)
	case value == nil: // not received yet
		return nil
	case part == Loads:
		return m.importLoads(value)
	}
	return m.importPairs(value)
}

// importMembers applies the Members part; m.mu is held.
func (m *Mirror) importMembers(value []byte) error {
	var in members
	if err := in.read(value); err != nil {
		return err
	}
	r, old := m.registry, m.now.Load()
	if in.mark != old.mark {
		m.refused = make(map[uint32]bool)
	}
	next := &numbering{mark: in.mark, byNumber: make(map[uint32]*Instance), byInstance: make(map[*Instance]uint32)}
	var list, restarted, out []*Instance
	r.mu.Lock()
	for n := range in.instances {
		e := &in.instances[n]
		i := m.known(e, old, next)
		switch {
		case i == nil:
			if i = m.admit(e); i == nil {
				continue
			}
		case i.isRestarted(e, in.mark == old.mark):
			restarted = append(restarted, i)
		}
		i.mirror(e)
		if e.State == Unhealthy || e.MoveAt != 0 { // all silent ones are unhealthy
			out = append(out, i)
		}
		list = append(list, i)
		next.byNumber[e.Number], next.byInstance[i] = i, e.Number
	}
	for _, i := range r.instances {
		if _, stays := next.byInstance[i]; !stays {
			r.beginDrain(i, m.drainFor())
			list = append(list, i)
		}
	}
	r.instances = list
	r.known.add(bitsOf(in.known))
	m.now.Store(next)
	r.publish()
	r.mu.Unlock()
	for _, i := range restarted {
		r.restarted(i)
	}
	if len(restarted) > 0 { // the last parts describe the former process
		m.last[Loads], m.last[Pairs] = nil, nil
	}
	for _, i := range out { // runs after publish, because the snapshot must already contain the other instances
		signal(i.evictNow)
	}
	signal(r.wake)
	m.noteArrived()
	if in.mark != old.mark {
		r.reports.resend(r.readyPairs())
	}
	return nil
}

// check rejects members that a registry never exports.
func (in *members) check() error {
	seen, ranks := make(map[uint32]bool), 0
	for n := range in.instances {
		switch e := &in.instances[n]; {
		case e.Number == 0 || seen[e.Number]:
			return fmt.Errorf("number %d is invalid or occurs twice", e.Number)
		case e.Spec.Ranks > maxRanks-ranks:
			return fmt.Errorf("more than %d ranks", maxRanks)
		default:
			seen[e.Number] = true
			ranks += max(0, e.Spec.Ranks)
		}
	}
	return nil
}

// known returns the instance of this registry that e describes, or nil. If the earlier
// export came from the same registry, this is the instance with e's number, otherwise the
// instance with the same spec and key. The caller holds m.mu and the registry's mu.
func (m *Mirror) known(e *member, old, next *numbering) *Instance {
	same := func(i *Instance) bool { return i != nil && i.Spec == e.Spec && i.APIKey == e.APIKey }
	if next.mark == old.mark {
		if i := old.byNumber[e.Number]; same(i) {
			return i
		}
		return nil
	}
	for _, i := range m.registry.instances {
		_, taken := next.byInstance[i]
		if !taken && same(i) && i.staying.Err() == nil && (i.State() == Draining) == (e.State == Draining) {
			return i
		}
	}
	return nil
}

// admit creates an instance for e. On a failure it logs once and returns nil. m.mu and
// the registry's mu are held.
func (m *Mirror) admit(e *member) *Instance {
	r := m.registry
	i, err := r.newInstance(e.Source, e.Spec)
	if err == nil {
		i.APIKey = e.APIKey
		err = r.connect([]*Instance{i})
	}
	if err != nil {
		if !m.refused[e.Number] {
			m.refused[e.Number] = true
			r.log.Error("engine cannot be used by this worker", "engine", e.Spec.Name, "error", err)
		}
		return nil
	}
	r.number(i)
	i.restarts.Store(e.Restarts)
	return i
}

// isRestarted reports whether e describes a new process of i. sameHome: i and e come from
// the same registry, so their counts of restarts can be compared.
func (i *Instance) isRestarted(e *member, sameHome bool) bool {
	if sameHome {
		return i.restarts.Load() != e.Restarts
	}
	f := i.facts.Load()
	return f != nil && e.Facts != nil && f.Epoch != "" && e.Facts.Epoch != "" && f.Epoch != e.Facts.Epoch
}

// mirror copies e to i; the registry's mu is held.
func (i *Instance) mirror(e *member) {
	i.facts.Store(e.Facts)
	i.state.Store(uint32(e.State))
	i.since.Store(e.Since)
	i.unresponsive.Store(e.Silent)
	i.ended.Store(e.Ended)
	i.asked.Store(!e.Unasked)
	var asleep *[]bool
	if len(e.Asleep) > 0 {
		asleep = &e.Asleep
	}
	i.sleep.ranks.Store(asleep)
	i.restarts.Store(e.Restarts)
	i.moveAt.Store(e.MoveAt)
}

// importLoads applies the Loads part; m.mu is held. Rows of unknown numbers are
// ignored.
func (m *Mirror) importLoads(value []byte) error {
	type row struct {
		i         *Instance
		in        *fleetpb.InstanceLoad
		transfers load.Fit
		copies    []load.Copy
	}
	var in fleetpb.Loads
	if err := fleetpb.Unmarshal(value, &in, maxRecords); err != nil {
		return err
	}
	number := m.now.Load()
	if in.Mark != number.mark {
		return nil // the registry is not mirrored, or no longer
	}
	var (
		rows []row
		v    values
		now  = time.Now()
	)
	for _, one := range in.Instances {
		x := row{i: number.byNumber[one.Number], in: one, transfers: v.fit(one.Transfers)}
		for _, c := range one.Ranks {
			x.copies = append(x.copies, v.rank(c))
		}
		if x.i != nil && len(x.copies) == len(x.i.Load) {
			rows = append(rows, x)
		}
	}
	if v.bad {
		return errors.New("a load is negative")
	}
	for _, x := range rows {
		x.i.eventBlockTokens.Store(min(max(0, x.in.EventBlockTokens), maxBlockTokens))
		x.i.metricBlockTokens.Store(min(max(0, x.in.MetricBlockTokens), maxBlockTokens))
		followCircuit(&x.i.Breaker, x.in.Circuit)
		x.i.Transfers.Follow(x.transfers)
		for rank := range x.i.Load {
			x.i.Load[rank].Follow(x.copies[rank], now, mirroredEvery)
		}
	}
	return nil
}

// importPairs applies the Pairs part; m.mu is held. Pairs that are missing in it stay: the
// exporting process may have fewer pairs.
func (m *Mirror) importPairs(value []byte) error {
	var in fleetpb.Pairs
	if err := fleetpb.Unmarshal(value, &in, maxRecords); err != nil {
		return err
	}
	number := m.now.Load()
	if in.Mark != number.mark {
		return nil
	}
	var pairs []*Pair
	for _, x := range in.Pairs {
		if p, d, ok := number.targets(pairKeyOf(x.Prefill, x.Decode)); ok {
			pair := m.registry.Pair(p, d)
			pair.follow(pairStateOf(x.State), x.Circuit)
			pairs = append(pairs, pair)
		}
	}
	m.registry.pairs.note(pairs...)
	return nil
}

// targets returns the targets of a pair by its instances' numbers.
func (n *numbering) targets(key pairKey) (p, d Target, ok bool) {
	if p, ok = n.target(key.prefill, key.prefillRank); ok {
		d, ok = n.target(key.decode, key.decodeRank)
	}
	return p, d, ok
}

func (n *numbering) target(number uint32, rank int) (Target, bool) {
	i := n.byNumber[number]
	return Target{Instance: i, Rank: rank}, i != nil && rank < len(i.Load)
}

// follow sets the pair to the state in another process. The caller notes the pair in the table.
func (p *Pair) follow(state abi.PairState, circuit *fleetpb.Circuit) {
	p.mu.Lock()
	if state != abi.PairReady { // whether the pair is warming here is the knowledge of this process
		state = abi.PairUnknown
		if p.under > 0 {
			state = abi.PairWarming
		}
	}
	followCircuit(&p.circuit, circuit)
	if p.state != state {
		p.become(state)
	}
	p.prove()
	p.mu.Unlock()
}

// readyPairs lists the pairs over which KV has come.
func (r *Registry) readyPairs() []*Pair {
	r.pairs.mu.RLock()
	pairs := slices.Collect(maps.Values(r.pairs.pairs))
	r.pairs.mu.RUnlock()
	return slices.DeleteFunc(pairs, func(p *Pair) bool { return p.State() != abi.PairReady })
}

// Run passes this process's observations of the instances to send, until ctx ends. send
// must deliver them to Learn of the mirrored registry in order. send may drop a report,
// but must not block, and must not use the mirror. Changes of circuits and pairs are sent
// by the goroutine that observes them, before that goroutine goes on. Other observations
// are sent ten times a second.
func (m *Mirror) Run(ctx context.Context, send func(report []byte)) {
	reports := m.registry.reports
	reports.sendBy(send)
	defer reports.sendBy(nil)
	tick := time.NewTicker(reportEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			reports.sendWaiting()
		}
	}
}
