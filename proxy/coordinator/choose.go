package coordinator

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// choose returns the rows for the legs: the policy's answer if it follows the contract,
// otherwise the native rule's. It then replaces rows whose pair or trial another request
// has claimed.
func (l *Local) choose(ctx context.Context, d Decider, t *table, g *committed, now time.Time) abi.PlaceDecision {
	chosen, policy, ok := d.Place(ctx, &t.place)
	g.Notes = append(g.Notes, t.place.Notes...)
	g.Policy = policy
	switch {
	case !ok:
		g.fallback("place", policy)
	case !t.place.Allows(chosen):
		g.fallback("place", ReasonNonsense)
		ok = false
	}
	if !ok {
		g.Policy, t.place.Scored = native, false
		if chosen, _, ok = l.fallback.Place(ctx, &t.place); !ok || !t.place.Allows(chosen) {
			chosen = t.leastLoad()
		}
	}
	return l.settle(t, g, chosen, now)
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
func (l *Local) settle(t *table, g *committed, d abi.PlaceDecision, now time.Time) abi.PlaceDecision {
	calm := func(i int32) bool { return !t.place.Candidates[i].Trial }
	if d.Prefill >= 0 && d.Prefill != t.place.Fixed && (l.stuck(t, d.Prefill, abi.RoleDecode, now) || !t.claim(d.Prefill)) {
		d.Prefill = t.replace(g, ReasonTrial, abi.RolePrefill, d.Prefill, d.Decode, calm)
	}
	if d.Prefill >= 0 && l.stuck(t, d.Decode, abi.RolePrefill, now) || !t.claim(d.Decode) {
		phase := abi.RoleDecode
		if d.Prefill < 0 {
			phase = abi.RoleBoth
		}
		d.Decode = t.replace(g, ReasonTrial, phase, d.Decode, d.Prefill, calm)
	}
	if d.Prefill < 0 || l.claimPair(t, d) {
		return d
	}
	decode := t.replace(g, ReasonPair, abi.RoleDecode, d.Decode, d.Prefill, func(i int32) bool {
		return calm(i) && !l.blocked(t.targets[d.Prefill], t.targets[i], now)
	})
	if decode != d.Decode || t.place.Fixed >= 0 {
		d.Decode = decode
		return d
	}
	if prefill := t.replace(nil, ReasonPair, abi.RolePrefill, d.Prefill, d.Decode, func(i int32) bool {
		return calm(i) && !l.blocked(t.targets[i], t.targets[d.Decode], now)
	}); prefill != d.Prefill {
		d.Prefill = prefill
		return d
	}
	return l.anyPair(t, calm, now)
}

// stuck reports whether the circuit of the engine of row i is half open while all its pairs with
// rows of the other phase are blocked. A request that took the trial of the engine would use
// another engine, and the proxy's own trial of the pair could not use this one.
func (l *Local) stuck(t *table, i int32, other abi.Role, now time.Time) bool {
	return t.place.Candidates[i].Trial && l.registry.PairsInTrouble() && t.least(other, i, func(j int32) bool {
		p, d := i, j
		if other == abi.RolePrefill {
			p, d = j, i
		}
		return t.targets[p].Instance != t.targets[d].Instance && !l.blocked(t.targets[p], t.targets[d], now)
	}) < 0
}

// anyPair returns the first pair that is not blocked and whose rows need no claim. If there is
// none, it returns the first such pair whose trial it can take from the proxy. If there is none
// of these either, it returns the rows -1: prefill would hold blocks that no decode reads and
// that cannot be freed.
func (l *Local) anyPair(t *table, calm func(int32) bool, now time.Time) abi.PlaceDecision {
	rows := t.place.Candidates
	for _, ok := range [...]func(p, d engine.Target) bool{
		func(p, d engine.Target) bool { return !l.blocked(p, d, now) },
		l.registry.TryPair,
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

// claimPair is claim for the pair of d. It returns false for a blocked pair.
func (l *Local) claimPair(t *table, d abi.PlaceDecision) bool {
	return !l.registry.PairsInTrouble() || l.registry.AllowPair(t.targets[d.Prefill], t.targets[d.Decode])
}

func (l *Local) blocked(p, d engine.Target, now time.Time) bool {
	return l.registry.PairBlocked(p, d, now)
}

// replace returns the least loaded row for the phase that is ok, and notes the fallback in
// g. It returns row if there is none.
func (t *table) replace(g *committed, reason string, phase abi.Role, row, other int32, ok func(int32) bool) int32 {
	if g != nil {
		g.fallback("place", reason)
	}
	if i := t.least(phase, other, ok); i >= 0 {
		return i
	}
	return row
}
