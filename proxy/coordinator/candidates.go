package coordinator

import (
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/load"
	"github.com/pdproxy/pdproxy/proxy/state/predict"
)

// Fitness of a row. A phase uses its rows of the highest fitness: an engine that failed before is
// better than no engine, and one that listens is better than one that does not.
const (
	fit      uint8 = iota
	full           // it has refused a request for lack of room
	broken         // its circuit, or that of its pair with the fixed prefill, is open
	excluded       // its instance failed in an earlier attempt of this exchange
	ended          // its host refuses connections
	worst    = ended
)

// table is the memory of one placement: the rows for the policy, and the facts. The facts
// are here because they escape to the Decider.
type table struct {
	plan    abi.PlanFacts
	place   abi.PlaceFacts
	mint    abi.MintFacts
	targets []engine.Target // of row i of place.Candidates
	fitness []uint8         // of row i
	needs   abi.Needs
	turn    conversation.Turn
	adapter string                  // LoRA adapter of the request; "": none
	trials  bool                    // the circuit of a row is half open
	known   []*engine.Pair          // memory of fillStates
	decodes map[engine.Target]int32 // memory of fillStates: the row of each decode target
	lookup

	tables   *sync.Pool
	types    *predict.Table
	registry *engine.Registry
}

// reset empties the table for a placement of a in p with these needs.
func (t *table) reset(p *engine.Pool, a *PlacementRequest, needs abi.Needs, now time.Time) {
	t.needs, t.turn, t.adapter, t.trials = needs, conversation.Turn{}, p.Adapter, false
	t.place = abi.PlaceFacts{Request: a.Request, Fixed: -1, Candidates: t.place.Candidates[:0], Pairs: t.place.Pairs[:0], Details: t.place.Details[:0], Predictions: t.place.Predictions[:0], Scores: t.place.Scores[:0]}
	t.place.Request.Model = p.Model
	if needs&abi.NeedTraits != 0 {
		t.place.Request.Remaining = a.Remaining(now)
		if t.place.Request.Adapter == "" {
			t.place.Request.Adapter = t.adapter[:min(len(t.adapter), abi.MaxAdapter)]
		}
	}
	t.targets, t.fitness = t.targets[:0], t.fitness[:0]
}

// add appends the target of r with its load and the given roles.
func (t *table) add(r *engine.Row, roles abi.Role, a *PlacementRequest, now time.Time) {
	t.place.Candidates = append(t.place.Candidates, r.Facts)
	c, f := &t.place.Candidates[len(t.place.Candidates)-1], fit
	c.Roles = roles
	counter := &r.Load[r.Rank]
	load := counter.View(now)
	c.Requests, c.Tokens, c.Usage, c.TokenMicros = load.Requests, load.Tokens, load.Usage, load.PrefillMicros
	if t.needs != 0 || t.adapter != "" {
		t.addNeeded(r, c, a, &load, now)
	}
	if counter.Full(now) && r.Target != a.Same.Prefill && r.Target != a.Same.Decode {
		f = full
	}
	switch r.Breaker.Circuit(now) {
	case circuit.Open:
		f = broken
	case circuit.HalfOpen:
		c.Trial, t.trials = true, true
	}
	switch {
	case r.Ended():
		f = ended
	case len(a.Excluded) != 0 && a.excludes(r.Instance):
		f = excluded
	}
	t.targets = append(t.targets, r.Target)
	t.fitness = append(t.fitness, f)
}

// addNeeded adds the facts about row c that only some policies need, or only requests for an adapter.
func (t *table) addNeeded(r *engine.Row, c *abi.Candidate, a *PlacementRequest, v *load.View, now time.Time) {
	if t.needs&abi.NeedDetails != 0 || t.adapter != "" {
		t.addReported(r, c, now)
	}
	if t.needs&abi.NeedBlocks != 0 {
		c.Queued = v.Queued
		c.RecentTokens, c.RecentRequests, c.Busy = r.Load[r.Rank].Recent(now)
		t.know(c, r.Target)
	}
	if t.needs&abi.NeedPredictions != 0 {
		t.predict(r, c, v, now)
	}
	if t.turn.Number != 0 {
		c.Home = homes(t.turn, r.Target)
	}
	if media := a.Key.Media; len(media) != 0 && t.needs&abi.NeedMedia != 0 {
		c.Media, c.MediaSent = uint8(len(media)), uint8(r.Media[r.Rank].Count(media))
	}
}

// addReported adds the facts about row c that its engine reports.
func (t *table) addReported(r *engine.Row, c *abi.Candidate, now time.Time) {
	said, ok := r.Load[r.Rank].Reported()
	counts := ok && said.Counts(now)
	if t.needs&abi.NeedDetails != 0 {
		d := r.Detail
		if counts {
			d.Running, d.Waiting = said.Running, said.Waiting
		}
		t.place.Details = append(t.place.Details, d)
	}
	if t.adapter != "" && counts {
		c.Adapter = said.Adapters.State(t.adapter)
		t.place.Adapters = t.place.Adapters || c.Adapter != abi.AdapterUnknown
	}
}

// move copies row from to row to; to is not above from.
func (t *table) move(to, from int) {
	t.place.Candidates[to] = t.place.Candidates[from]
	if len(t.place.Details) != 0 {
		t.place.Details[to] = t.place.Details[from]
	}
	if len(t.place.Predictions) != 0 {
		t.place.Predictions[to] = t.place.Predictions[from]
	}
	t.targets[to] = t.targets[from]
	t.fitness[to] = t.fitness[from]
}

func (t *table) truncate(n int) {
	t.place.Candidates, t.targets, t.fitness = t.place.Candidates[:n], t.targets[:n], t.fitness[:n]
	t.place.Details = t.place.Details[:min(n, len(t.place.Details))]
	t.place.Predictions = t.place.Predictions[:min(n, len(t.place.Predictions))]
}

// fillAggregated lists the targets for one leg: those of role both, and those of a phase
// in a.Aggregate.
func (t *table) fillAggregated(p *engine.Pool, a *PlacementRequest, now time.Time) {
	t.place.Flow = abi.FlowAggregated
	rows := p.Both
	if a.Aggregate != 0 {
		rows = p.Ready
	}
	best := worst
	for i := range rows {
		r := &rows[i]
		if (r.Facts.Roles == abi.RoleBoth || r.Facts.Roles&a.Aggregate != 0) && among(a.Within.Whole, r.Instance) {
			t.add(r, r.Facts.Roles, a, now)
			best = min(best, t.fitness[len(t.fitness)-1])
		}
	}
	t.keepFit(best)
}

// fillPhase lists the targets that can take one phase of two legs.
func (t *table) fillPhase(p *engine.Pool, a *PlacementRequest, phase abi.Phase, now time.Time) {
	t.place.Flow = abi.FlowAggregated
	role, within := abi.RolePrefill, a.Within.Prefill
	if phase == abi.Decode {
		role, within = abi.RoleDecode, a.Within.Decode
	}
	best := worst
	for i := range p.Ready {
		r := &p.Ready[i]
		if r.Facts.Group != 0 && r.Facts.Roles&role != 0 && among(within, r.Instance) {
			t.add(r, role, a, now)
			last := len(t.fitness) - 1
			t.place.Candidates[last].Home &= role
			best = min(best, t.fitness[last])
		}
	}
	t.keepFit(best)
}

// keepFit removes the rows that are less fit than best.
func (t *table) keepFit(best uint8) {
	n := 0
	for i := range t.fitness {
		if t.fitness[i] <= best {
			t.move(n, i)
			n++
		}
	}
	t.truncate(n)
}

// keepSame removes all rows except those of a.Same, if its targets are in the table and
// the number of legs is equal.
func (t *table) keepSame(a *PlacementRequest) {
	one := t.place.Flow == abi.FlowAggregated
	if t.place.Fixed >= 0 || one != a.Same.Prefill.IsZero() {
		return
	}
	decode, prefill := t.row(a.Same.Decode, abi.RoleDecode), int32(-1)
	if one {
		decode = t.row(a.Same.Decode, abi.RoleBoth)
	} else if prefill = t.row(a.Same.Prefill, abi.RolePrefill); prefill < 0 {
		return
	}
	if decode < 0 {
		return
	}
	rows := t.place.Candidates
	if one {
		t.move(0, int(decode))
		t.truncate(1)
		return
	}
	if rows[prefill].Group != rows[decode].Group {
		return
	}
	rows[prefill].Roles, rows[decode].Roles = abi.RolePrefill, abi.RoleDecode
	first, second := min(prefill, decode), max(prefill, decode)
	t.move(0, int(first))
	t.move(1, int(second))
	t.truncate(2)
}

// fillStates lists the known pairs of the table's rows. If the prefill target is kept, it
// also notes in each decode row the state of its pair. The work grows with the rows and with the
// known pairs, not with the possible pairs.
func (t *table) fillStates() {
	rows := t.place.Candidates
	for j := range rows {
		if rows[j].Roles&abi.RoleDecode != 0 {
			t.decodes[t.targets[j]] = int32(j)
		}
	}
	for i := range rows {
		if rows[i].Roles&abi.RolePrefill == 0 {
			continue
		}
		t.known = t.registry.AppendPairs(t.known[:0], t.targets[i])
		for _, pair := range t.known {
			j, ok := t.decodes[pair.Decode]
			if !ok || j == int32(i) || rows[i].Group != rows[j].Group {
				continue
			}
			state := pair.State()
			if state == abi.PairUnknown {
				continue
			}
			t.place.Pairs = append(t.place.Pairs, abi.Pair{Prefill: int32(i), Decode: j, State: state, TransferMicros: pair.TransferMicros()})
			if int32(i) == t.place.Fixed {
				rows[j].Pair = state
			}
		}
	}
	clear(t.decodes) // so that the memory keeps no instance that has left
	clear(t.known[:cap(t.known)])
}

// row returns the row of target that can take one of the phases; -1: none.
func (t *table) row(target engine.Target, phases abi.Role) int32 {
	for i := range t.targets {
		if t.targets[i] == target && t.place.Candidates[i].Roles&phases != 0 {
			return int32(i)
		}
	}
	return -1
}

// fillFixed lists the kept prefill target as row 0, and the decode targets of its group.
// False: the prefill target has left, or there is no decode target for it.
func (t *table) fillFixed(p *engine.Pool, a *PlacementRequest, now time.Time) bool {
	group, ok := p.Group(a.Prefill)
	if !ok {
		return false
	}
	t.place.Flow, t.place.Fixed = a.Prefill.Flow, 0
	fixed := engine.Row{Target: a.Prefill, Detail: a.Prefill.Instance.Detail(), Facts: abi.Candidate{Group: group, Instance: a.Prefill.ID, Rank: int32(a.Prefill.Rank)}}
	t.add(&fixed, abi.RolePrefill, a, now)
	trouble := t.registry.PairsInTrouble()
	best := worst
	for i := range p.Ready {
		r := &p.Ready[i]
		if r.Facts.Group != group || r.Facts.Roles&abi.RoleDecode == 0 || r.Target == a.Prefill || !among(a.Within.Decode, r.Instance) {
			continue
		}
		t.add(r, abi.RoleDecode, a, now)
		last := len(t.fitness) - 1
		if trouble && t.registry.PairBlocked(a.Prefill, r.Target, now) {
			t.fitness[last] = max(t.fitness[last], broken)
		}
		best = min(best, t.fitness[last])
	}
	n := 1
	for i := 1; i < len(t.fitness); i++ {
		if t.fitness[i] <= best {
			t.move(n, i)
			n++
		}
	}
	t.truncate(n)
	return n > 1
}

// fillPairs lists targets for pairs: of each group the fittest of each phase, and of all
// groups those whose less fit phase is fittest. The rows keep the promise of
// abi.PlaceFacts. A target with an open circuit is no decode: prefill would hold blocks
// that no decode reads and that cannot be freed. If there is no row, ok is false, and
// missing is the phase without a target.
func (t *table) fillPairs(p *engine.Pool, a *PlacementRequest, now time.Time) (missing abi.Phase, ok bool) {
	best, start, noDecode := worst+1, 0, false
	limited := a.Within.Prefill != nil || a.Within.Decode != nil
	for _, end := range p.Groups {
		from := len(t.fitness)
		uneven := false // in fitness, or a row lacks a role
		for i := start; i < end; i++ {
			r := &p.Paired[i]
			roles := r.Facts.Roles
			if limited {
				roles = a.Within.roles(r)
			}
			if roles&abi.RoleDecode != 0 && r.Breaker.Circuit(now) == circuit.Open {
				roles &^= abi.RoleDecode
				noDecode = true
			}
			if roles != 0 {
				t.add(r, roles, a, now)
				uneven = uneven || t.fitness[len(t.fitness)-1] != fit
			}
			uneven = uneven || roles != r.Facts.Roles
		}
		start = end
		if uneven || len(p.Groups) > 1 {
			best = t.keepGroup(from, uneven, best)
		}
	}
	switch {
	case len(t.targets) > 0:
		t.place.Flow = t.targets[0].Flow
		return abi.PhaseNone, true
	case noDecode:
		return abi.Decode, false
	}
	return lacks(p), false
}

// keepGroup keeps the rows of the group that begins at row from, or those of the earlier groups,
// whichever are fitter, and returns their fitness; best is that of the earlier groups.
func (t *table) keepGroup(from int, uneven bool, best uint8) uint8 {
	level := fit
	if uneven {
		level = t.sift(from)
	}
	switch {
	case level > best:
		t.truncate(from)
	case level < best && from > 0:
		n := len(t.fitness) - from
		for i := range n {
			t.move(i, from+i)
		}
		t.truncate(n)
	}
	return min(level, best)
}

// lacks returns the phase for which the pool has no ready target. Prefill: both phases
// have targets, but no two targets can be paired. PhaseNone: no connector uses pairs.
func lacks(pool *engine.Pool) abi.Phase {
	if !pool.Pairs {
		return abi.PhaseNone
	}
	var roles abi.Role
	for i := range pool.Ready {
		if f := &pool.Ready[i].Facts; f.Group != 0 {
			roles |= f.Roles
		}
	}
	if roles == abi.RolePrefill {
		return abi.Decode
	}
	return abi.Prefill
}

// fixedLacks returns the missing phase if the prefill target is kept.
func fixedLacks(pool *engine.Pool, a *PlacementRequest) abi.Phase {
	if _, ok := pool.Group(a.Prefill); !ok {
		return abi.Prefill
	}
	return abi.Decode
}
