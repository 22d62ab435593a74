package engine

import (
	"bytes"
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// Part is one part of an exported registry. A mirror needs the latest value of each part.
// Members must be the first, because the other parts refer to instances by the numbers in
// Members.
type Part uint8

// The parts.
const (
	Members Part = iota // the instances and their facts
	Loads               // load, speed and health of the instances
	Pairs               // state of the pairs
)

// exportEvery is how often loads and pairs are exported. Members are exported when they
// change.
const exportEvery = 250 * time.Millisecond

// members is the Members part.
type members struct {
	mark      uint64 // identifies the registry with these numbers
	instances []member
	known     []Known // models that it has known
}

// read decodes the Members part.
func (in *members) read(value []byte) error {
	var m fleetpb.Members
	if err := fleetpb.Unmarshal(value, &m, maxRecords); err != nil {
		return err
	}
	in.mark = m.Mark
	for _, k := range m.Known {
		in.known = append(in.known, Known{k.Model, uint8(k.Roles)})
	}
	for _, one := range m.Instances {
		e, err := getMember(one)
		if err != nil {
			return err
		}
		in.instances = append(in.instances, e)
	}
	return in.check()
}

// member is one instance in it.
type member struct {
	Number   uint32 // Instance.ID in the exporting registry
	Source   string
	Spec     config.Engine
	APIKey   string
	State    State
	Silent   bool   // Instance.Unresponsive
	Ended    bool   // Instance.Ended
	Unasked  bool   // the first probe has not ended
	Asleep   []bool // ranks that sleep
	Since    int64  // Unix ms
	Restarts uint32
	MoveAt   int64  // Instance.moveAt
	Facts    *Facts // nil: not known yet
}

// Export passes the registry's parts to publish, first all of them and then each one
// that has changed, until ctx ends. Unchanged loads are passed again after mirroredEvery,
// because loads without updates fade in a mirror. publish may keep the value and must not
// block. Only one Export may run at a time.
func (r *Registry) Export(ctx context.Context, publish func(part Part, value []byte)) {
	var (
		loads, lastLoads []byte
		lastMembers      = r.exportMembers()
		version          = r.pairs.version.Load()
		exported         time.Time // when the loads were exported
	)
	publish(Members, lastMembers)
	publish(Pairs, r.exportPairs())
	tick := time.NewTicker(exportEvery)
	defer tick.Stop()
	for {
		now := time.Now()
		if loads = r.appendLoads(loads[:0], now); !bytes.Equal(loads, lastLoads) || now.Sub(exported) >= mirroredEvery {
			lastLoads, exported = bytes.Clone(loads), now
			publish(Loads, lastLoads)
		}
		select {
		case <-ctx.Done():
			return
		case <-r.changed:
			if b := r.exportMembers(); !bytes.Equal(b, lastMembers) {
				lastMembers = b
				publish(Members, b)
			}
		case <-tick.C:
		}
		if v := r.pairs.version.Load(); v != version {
			version = v
			publish(Pairs, r.exportPairs())
		}
	}
}

// exportMembers encodes the Members part.
func (r *Registry) exportMembers() []byte {
	out := &fleetpb.Members{Mark: r.mark}
	s := r.Snapshot()
	for _, m := range s.Known() {
		out.Known = append(out.Known, &fleetpb.KnownModel{Model: m, Roles: uint32(s.known.roles[m])})
	}
	for _, i := range s.Instances {
		out.Instances = append(out.Instances, putMember(&member{
			Number: i.ID, Source: i.Source, Spec: i.Spec, APIKey: i.APIKey, State: i.State(), Silent: i.Unresponsive(), Ended: i.Ended(),
			Unasked: !i.asked.Load(), Asleep: i.sleeping(), Since: i.since.Load(), Restarts: i.restarts.Load(), MoveAt: i.moveAt.Load(), Facts: i.facts.Load(),
		}))
	}
	return fleetpb.Append(nil, out)
}

// String returns the name of the part for logs.
func (p Part) String() string {
	return [...]string{"members", "loads", "pairs", "unknown part"}[min(p, Pairs+1)]
}

// appendLoads encodes the Loads part.
func (r *Registry) appendLoads(b []byte, now time.Time) []byte {
	out := &fleetpb.Loads{Mark: r.mark}
	for _, i := range r.Snapshot().Instances {
		m := &fleetpb.InstanceLoad{
			Number: i.ID, EventBlockTokens: i.eventBlockTokens.Load(), MetricBlockTokens: i.metricBlockTokens.Load(),
			Circuit: putCircuit(&i.Breaker, now), Transfers: putFit(i.Transfers.Fit()), Ranks: make([]*fleetpb.RankLoad, len(i.Load)),
		}
		for rank := range i.Load {
			c := i.Load[rank].Copy(now)
			m.Ranks[rank] = &fleetpb.RankLoad{
				Requests: c.Requests, Tokens: c.Tokens, Queued: c.Queued, Waiting: c.Waiting, Usage: c.Usage,
				RecentTokens: c.RecentTokens, RecentRequests: c.RecentRequests, RecentWork: c.RecentWork,
				Prefill: putFit(c.Prefill), Output: putFit(c.Output),
			}
		}
		out.Instances = append(out.Instances, m)
	}
	return fleetpb.Append(b, out)
}

// exportPairs encodes the Pairs part.
func (r *Registry) exportPairs() []byte {
	now := time.Now()
	r.pairs.mu.RLock()
	pairs := maps.Clone(r.pairs.pairs)
	r.pairs.mu.RUnlock()
	out := &fleetpb.Pairs{Mark: r.mark}
	for _, key := range slices.SortedFunc(maps.Keys(pairs), comparePairKeys) {
		m := new(fleetpb.PairState)
		m.Prefill, m.Decode = key.targets()
		p := pairs[key]
		p.mu.Lock()
		m.State, m.Circuit = uint32(p.state), putCircuit(&p.circuit, now)
		p.mu.Unlock()
		out.Pairs = append(out.Pairs, m)
	}
	return fleetpb.Append(nil, out)
}

func comparePairKeys(a, b pairKey) int {
	return cmp.Or(cmp.Compare(a.prefill, b.prefill), cmp.Compare(a.decode, b.decode), a.prefillRank-b.prefillRank, a.decodeRank-b.decodeRank)
}
