package plugins

import (
	"context"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/plugins/policy"
)

// Plan calls the plan policies in their order. The first policy that does not pass
// decides. A limit set by a policy that passes applies unless the deciding policy sets
// another, or holds the request. by is the name of the policy that decided. When ok is false, by is the reason
// why there is no decision, a constant of package policy.
func (s *Set) Plan(_ context.Context, f *abi.PlanFacts) (a abi.PlanAnswer, by string, ok bool) {
	var limit uint32
	for {
		t := s.table.Load()
		for i := range t.plan {
			p, reason := &t.plan[i], ""
			if p.wasm != nil {
				by = p.wasm.Label
				q := p.wasm
				if len(t.canaries) > 0 {
					q = t.turn(q)
				}
				a, reason = q.Plan(f)
			} else {
				by, a = p.name, abi.PlanAnswer{Decision: p.decide(f)}
			}
			if reason == policy.Closed && s.table.Load() != t { // replaced in the meantime
				break
			}
			if reason != "" {
				return abi.PlanAnswer{}, reason, false
			}
			if a.LimitMillis == 0 && a.Decision != abi.PlanHold {
				a.LimitMillis = limit
			}
			if limit = a.LimitMillis; a.Decision != abi.PlanPass || i == len(t.plan)-1 {
				return a, by, true
			}
		}
	}
}

// Place calls the place policy, as Plan does. The policy may write scores into the
// candidates.
func (s *Set) Place(_ context.Context, f *abi.PlaceFacts) (d abi.PlaceDecision, by string, ok bool) {
	for {
		t := s.table.Load()
		if len(t.scores) == 0 {
			return ask(s, func(t *table) *placer { return &t.place }, (*policy.Policy).Place, f)
		}
		d, reason := t.placeByScores(f)
		switch {
		case reason == "":
			return d, Scores, true
		case reason != policy.Closed || s.table.Load() == t:
			return d, reason, false
		}
	}
}

// Mint calls the mint policy, as Plan does.
func (s *Set) Mint(_ context.Context, f *abi.MintFacts) (id uint64, by string, ok bool) {
	return ask(s, func(t *table) *minter { return &t.mint }, (*policy.Policy).Mint, f)
}

// Retain calls the retain policy, as Plan does.
func (s *Set) Retain(f *abi.RetainFacts) (d abi.RetainDecision, by string, ok bool) {
	return ask(s, func(t *table) *retainer { return &t.retain }, (*policy.Policy).Retain, f)
}

// Evicts reports whether a policy may end running requests.
func (s *Set) Evicts() bool {
	t := s.table.Load()
	return t.evict.wasm != nil || t.evict.native != nil
}

// Evict calls the evict policy, as Plan does. The row is abi.EvictNone when ok is false.
func (s *Set) Evict(f *abi.EvictFacts) (row int32, by string, ok bool) {
	if !s.Evicts() {
		return abi.EvictNone, policy.Absent, false
	}
	if row, by, ok = ask(s, func(t *table) *evictor { return &t.evict }, (*policy.Policy).Evict, f); !ok {
		row = abi.EvictNone
	}
	return row, by, ok
}

// ask gets a decision of one policy of the table. It repeats the call if the policy's
// version was replaced in the meantime. in selects the decider of a table. call calls the
// decider's hook in WebAssembly.
func ask[F, A any](s *Set, in func(*table) *decider[F, A], call func(*policy.Policy, F) (A, string), f F) (a A, by string, ok bool) {
	for {
		t := s.table.Load()
		p := in(t)
		if p.wasm == nil {
			return p.decide(f), p.name, true
		}
		q := p.wasm
		if len(t.canaries) > 0 {
			q = t.turn(q)
		}
		a, reason := call(q, f)
		switch {
		case reason == "":
			return a, p.wasm.Label, true
		case reason != policy.Closed || s.table.Load() == t:
			var none A
			return none, reason, false
		}
	}
}

// Needs returns the needs of the loaded policies.
func (s *Set) Needs() abi.Needs { return s.table.Load().needs }

// Headers returns the names of the request headers that the loaded policies declare.
func (s *Set) Headers() []string { return s.table.Load().headers }

// HasLegs reports whether a policy has the leg or the finish hook.
func (s *Set) HasLegs() bool {
	t := s.table.Load()
	return len(t.legs)+len(t.finish) > 0
}

// Leg calls the policies that have the leg hook. The first answer other than abi.LegPass
// decides. Leg appends the policy's edits to edits. When no policy decided, the reason is
// that of the first policy that failed.
func (s *Set) Leg(_ context.Context, f *abi.LegFacts, edits []byte) (d abi.LegDecision, list []byte, reason string) {
	t := s.table.Load()
	for i := 0; i < len(t.legs); i++ {
		d, list, why := t.turn(t.legs[i]).Leg(f, edits)
		switch now := s.table.Load(); {
		case why == policy.Closed && now != t: // replaced in the meantime
			t, i, reason = now, -1, ""
		case why == "" && d != abi.LegPass:
			return d, list, ""
		case reason == "":
			reason = why
		}
	}
	if len(t.legs) == 0 {
		reason = policy.Absent
	}
	return abi.LegPass, edits, reason
}

// Finish calls all policies that have the finish hook.
func (s *Set) Finish(f *abi.FinishFacts) {
	t := s.table.Load()
	for _, p := range t.finish {
		// A version that was replaced in the meantime is not called. Its
		// successor is not called either, because it has not seen the exchange.
		t.turn(p).Finish(f)
	}
}
