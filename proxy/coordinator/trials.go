package coordinator

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// claimOnly returns the rows of a.Only, a pair that the proxy has claimed. Both engines must be
// idle, unless the request is the trial of a broken pair.
func (t *table) claimOnly(pool *engine.Pool, a *PlacementRequest, now time.Time) (chosen abi.PlaceDecision, err error) {
	p, e := a.Only.Prefill, a.Only.Decode
	if !t.registry.PairBlocked(p, e, now) && !(p.Free(now) && e.Free(now)) {
		return chosen, &NoTargetError{Model: a.Model}
	}
	if _, ok := t.fillPairs(pool, a, now); !ok {
		return chosen, &NoTargetError{Model: a.Model}
	}
	chosen = abi.PlaceDecision{Prefill: t.row(p, abi.RolePrefill), Decode: t.row(e, abi.RoleDecode)}
	if chosen.Prefill < 0 || chosen.Decode < 0 || !t.place.Allows(chosen) || !t.claim(chosen.Prefill) || !t.claim(chosen.Decode) {
		return chosen, &NoTargetError{Model: a.Model}
	}
	return chosen, nil
}

// leastLoad places by the fewest tokens, prefill first. It has an answer for every table
// with rows.
func (t *table) leastLoad() abi.PlaceDecision {
	every := func(int32) bool { return true }
	if t.place.Flow == abi.FlowAggregated {
		return abi.PlaceDecision{Prefill: -1, Decode: t.least(abi.RoleBoth, -1, every)}
	}
	prefill := t.place.Fixed
	if prefill < 0 {
		prefill = t.least(abi.RolePrefill, -1, every)
	}
	return abi.PlaceDecision{Prefill: prefill, Decode: t.least(abi.RoleDecode, prefill, every)}
}

// least returns the row with the fewest tokens, among the rows that can run the phase and
// for which ok returns true. It prefers an instance different from the instance of row
// other (-1: no preference). It returns -1 if there is no such row.
func (t *table) least(phase abi.Role, other int32, ok func(int32) bool) int32 {
	rows, best := t.place.Candidates, int32(-1)
	for i := range rows {
		c := &rows[i]
		if c.Roles&phase == 0 || int32(i) == other || other >= 0 && c.Group != rows[other].Group || !ok(int32(i)) {
			continue
		}
		if best >= 0 {
			b := &rows[best]
			if other >= 0 && (c.Instance == rows[other].Instance) != (b.Instance == rows[other].Instance) {
				if c.Instance == rows[other].Instance {
					continue
				}
			} else if c.Tokens > b.Tokens || c.Tokens == b.Tokens && c.Requests >= b.Requests {
				continue
			}
		}
		best = int32(i)
	}
	return best
}

// settle claims the trials of half-open circuits among the decision's targets, and its
// pair. If a claim fails, the least loaded row that needs no claim replaces the row. If
// there is none, the decision stays: a request that may fail is better than one that fails
// for certain. The exception is a pair whose circuit is open while prefill has not
// computed the KV: see anyPair.
func (t *table) settle(g *Placement, d abi.PlaceDecision, now time.Time) abi.PlaceDecision {
	calm := func(i int32) bool { return !t.place.Candidates[i].Trial }
	if d.Prefill >= 0 && d.Prefill != t.place.Fixed && (t.stuck(d.Prefill, abi.RoleDecode, now) || !t.claim(d.Prefill)) {
		d.Prefill = t.replace(g, ReasonTrial, abi.RolePrefill, d.Prefill, d.Decode, calm)
	}
	if d.Prefill >= 0 && t.stuck(d.Decode, abi.RolePrefill, now) || !t.claim(d.Decode) {
		phase := abi.RoleDecode
		if d.Prefill < 0 {
			phase = abi.RoleBoth
		}
		d.Decode = t.replace(g, ReasonTrial, phase, d.Decode, d.Prefill, calm)
	}
	if d.Prefill < 0 || t.registry.AllowPair(t.targets[d.Prefill], t.targets[d.Decode]) {
		return d
	}
	decode := t.replace(g, ReasonPair, abi.RoleDecode, d.Decode, d.Prefill, func(i int32) bool {
		return calm(i) && !t.registry.PairBlocked(t.targets[d.Prefill], t.targets[i], now)
	})
	if decode != d.Decode || t.place.Fixed >= 0 {
		d.Decode = decode
		return d
	}
	if prefill := t.replace(nil, ReasonPair, abi.RolePrefill, d.Prefill, d.Decode, func(i int32) bool {
		return calm(i) && !t.registry.PairBlocked(t.targets[i], t.targets[d.Decode], now)
	}); prefill != d.Prefill {
		d.Prefill = prefill
		return d
	}
	return t.anyPair(calm, now)
}

// stuck reports whether the circuit of the engine of row i is half open while all its pairs with
// rows of the other phase are blocked. A request that took the trial of the engine would use
// another engine, and the proxy's own trial of the pair could not use this one.
func (t *table) stuck(i int32, other abi.Role, now time.Time) bool {
	return t.place.Candidates[i].Trial && t.registry.PairsInTrouble() && t.least(other, i, func(j int32) bool {
		p, d := i, j
		if other == abi.RolePrefill {
			p, d = j, i
		}
		return t.targets[p].Instance != t.targets[d].Instance && !t.registry.PairBlocked(t.targets[p], t.targets[d], now)
	}) < 0
}

// anyPair returns the first pair that is not blocked and whose rows need no claim. If there is
// none, it returns the first such pair whose trial it can take from the proxy. If there is none
// of these either, it returns the rows -1: prefill would hold blocks that no decode reads and
// that cannot be freed.
func (t *table) anyPair(calm func(int32) bool, now time.Time) abi.PlaceDecision {
	rows := t.place.Candidates
	for _, ok := range [...]func(p, d engine.Target) bool{
		func(p, d engine.Target) bool { return !t.registry.PairBlocked(p, d, now) },
		t.registry.TryPair,
	} {
		for i := range rows {
			for j := range rows {
				d := abi.PlaceDecision{Prefill: int32(i), Decode: int32(j)}
				if rows[i].Instance != rows[j].Instance && calm(d.Prefill) && calm(d.Decode) && t.place.Allows(d) && ok(t.targets[i], t.targets[j]) {
					return d
				}
			}
		}
	}
	return abi.PlaceDecision{Prefill: -1, Decode: -1}
}

// claim takes the trial of row i if its circuit is half open. It returns false if another
// request has the trial.
func (t *table) claim(i int32) bool {
	return !t.place.Candidates[i].Trial || t.targets[i].Breaker.Allow()
}

// replace returns the least loaded row for the phase that is ok, and notes the fallback in
// g. It returns row if there is none.
func (t *table) replace(g *Placement, reason string, phase abi.Role, row, other int32, ok func(int32) bool) int32 {
	if g != nil {
		g.fallback("place", reason)
	}
	if i := t.least(phase, other, ok); i >= 0 {
		return i
	}
	return row
}
