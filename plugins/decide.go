package plugins

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/plugins/policy"
)

// Plan asks the plan policies in their order; the first that does not pass
// decides. A limit that one of them sets holds unless who decides sets another.
// by names who decided; when ok is false it is the reason why there is no
// decision, one of package policy's.
func (s *Set) Plan(_ context.Context, f *abi.PlanFacts) (a abi.PlanAnswer, by string, ok bool) {
	var limit uint32
	for {
		t := s.table.Load()
		for i := range t.plan {
			p, reason := &t.plan[i], ""
			if p.wasm != nil {
				by = p.wasm.Label
				a, reason = t.turn(p.wasm).Plan(f)
			} else {
				by = p.name
				began := time.Now()
				a = abi.PlanAnswer{Decision: p.native(f)}
				p.observe(began)
			}
			if reason == policy.Closed && s.table.Load() != t { // replaced meanwhile
				break
			}
			if reason != "" {
				return abi.PlanAnswer{}, reason, false
			}
			if a.LimitMillis == 0 {
				a.LimitMillis = limit
			}
			if limit = a.LimitMillis; a.Decision != abi.PlanPass || i == len(t.plan)-1 {
				return a, by, true
			}
		}
	}
}

// Place asks the place policy, as Plan. It may write scores into the candidates.
func (s *Set) Place(_ context.Context, f *abi.PlaceFacts) (d abi.PlaceDecision, by string, ok bool) {
	for {
		t := s.table.Load()
		p := &t.place
		if p.wasm == nil {
			began := time.Now()
			d = p.native(f)
			p.observe(began)
			return d, p.name, true
		}
		switch d, reason := t.turn(p.wasm).Place(f); {
		case reason == "":
			return d, p.wasm.Label, true
		case reason != policy.Closed || s.table.Load() == t:
			return abi.PlaceDecision{}, reason, false
		}
	}
}

// Mint asks the mint policy, as Plan.
func (s *Set) Mint(_ context.Context, f *abi.MintFacts) (id uint64, by string, ok bool) {
	for {
		t := s.table.Load()
		p := &t.mint
		if p.wasm == nil {
			began := time.Now()
			id = p.native(f)
			p.observe(began)
			return id, p.name, true
		}
		switch id, reason := t.turn(p.wasm).Mint(f); {
		case reason == "":
			return id, p.wasm.Label, true
		case reason != policy.Closed || s.table.Load() == t:
			return 0, reason, false
		}
	}
}

// Needs is what the loaded policies want to be shown.
func (s *Set) Needs() abi.Needs { return s.table.Load().needs }

// HasLegs reports whether a policy has the leg or the finish hook.
func (s *Set) HasLegs() bool {
	t := s.table.Load()
	return len(t.legs)+len(t.finish) > 0
}

// Leg asks the policies that have the leg hook; the first whose answer is not to
// leave things as they are decides. Edits are appended to edits. The reason is
// that of the first one that failed, when none decided.
func (s *Set) Leg(_ context.Context, f *abi.LegFacts, edits []byte) (d abi.LegDecision, list []byte, reason string) {
	t := s.table.Load()
	for i := 0; i < len(t.legs); i++ {
		d, list, why := t.turn(t.legs[i]).Leg(f, edits)
		switch now := s.table.Load(); {
		case why == policy.Closed && now != t: // replaced meanwhile
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

// Finish tells all policies that have the finish hook.
func (s *Set) Finish(f *abi.FinishFacts) {
	t := s.table.Load()
	for _, p := range t.finish {
		// A version that was replaced meanwhile has no say, and its successor no
		// claim to an exchange that it has not seen.
		t.turn(p).Finish(f)
	}
}
