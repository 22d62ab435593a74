package engine

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/circuit"
)

// ownTrial is how long a half-open circuit of a pair waits for a trial of the proxy. If the
// proxy has not begun one by then (for example because a worker has lost its coordinator), a
// user's request may be the trial.
const ownTrial = 5 * time.Second

// blocked reports whether no user's request should use the pair at now. It takes no lock.
func (p *Pair) blocked(now time.Time) bool {
	switch p.circuit.Circuit(now) {
	case circuit.Closed:
		return false
	case circuit.Open:
		return true
	}
	return p.tried.Load() || !p.users.Load() && p.circuit.Circuit(now.Add(-ownTrial)) == circuit.Open
}

// ClaimTrial returns a pair of ready targets whose circuit is half open, with its trial, and a
// model that both targets serve; nil if there is none. If home is not nil, it is one of the two
// instances. The caller sends a request through the pair, and must then call Tried.
func (r *Registry) ClaimTrial(now time.Time, home *Instance) (model string, pair *Pair) {
	trouble := r.pairs.trouble.Load()
	if trouble == nil {
		return "", nil
	}
	s := r.Snapshot()
	for _, pair := range *trouble {
		if home != nil && home != pair.Prefill.Instance && home != pair.Decode.Instance ||
			pair.users.Load() || pair.circuit.Circuit(now) != circuit.HalfOpen {
			continue
		}
		model, ok := s.pairs(pair.Prefill, pair.Decode)
		if !ok || !pair.tried.CompareAndSwap(false, true) {
			continue
		}
		if pair.circuit.Allow() {
			pair.mu.Lock()
			pair.noted = false
			pair.prove()
			pair.mu.Unlock()
			return model, pair
		}
		pair.tried.Store(false)
	}
	return "", nil
}

// pairs returns a model for which p and d can be paired now.
func (s *Snapshot) pairs(p, d Target) (model string, ok bool) {
	for _, model := range s.models {
		prefill, decode := s.pools[model].row(p, abi.RolePrefill), s.pools[model].row(d, abi.RoleDecode)
		if prefill != nil && decode != nil && prefill.Facts.Group == decode.Facts.Group {
			return model, true
		}
	}
	return "", false
}

// row returns the row in Paired of a target that can take the phase, or nil.
func (p *Pool) row(t Target, phase abi.Role) *Row {
	for i := range p.Paired {
		if r := &p.Paired[i]; r.Target == t && r.Facts.Roles&phase != 0 {
			return r
		}
	}
	return nil
}

// Tried notes the end of a request of the proxy for which ClaimTrial or ClaimFresh returned the
// pair. Success or Failure has noted the outcome before. refused: the engines do not serve such
// a request, so the outcome of the trial is unknown, and a user's request may be the next trial
// at once. After any other end without an outcome, the proxy tries again after the pause that the
// trial began.
func (p *Pair) Tried(refused bool) {
	p.mu.Lock()
	if refused && !p.noted && p.Trial() {
		p.users.Store(true)
		p.circuit.Halve()
	}
	p.tried.Store(false)
	p.prove()
	p.mu.Unlock()
	p.table.version.Add(1)
}
