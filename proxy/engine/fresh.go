package engine

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// A pair whose warm-up failed gets another after warmAgain, then after twice that time,
// and so on up to warmAtLast.
const (
	warmAgain  = 2 * time.Second
	warmAtLast = 2 * time.Minute
)

// Free reports whether no rank of the instance has a request in flight, by the proxy's
// count and by the engine's own.
func (i *Instance) Free(now time.Time) bool {
	for rank := range i.Load {
		if i.Load[rank].View(now).Requests != 0 {
			return false
		}
	}
	return true
}

// ClaimFresh returns a pair of ready targets over which no KV has come yet and whose
// instances are both free, and a model that they serve; nil if there is none. If home is
// not nil, it is one of the two instances. The pair is not returned again for a while, and a
// pair whose circuit is not closed never: see ClaimTrial. There is none while the pair table is
// full: a search would look at each of the possible pairs. The caller must call Tried.
func (r *Registry) ClaimFresh(now time.Time, home *Instance, free func(*Instance) bool) (model string, pair *Pair) {
	if r.pairs.full() {
		return "", nil
	}
	s := r.Snapshot()
	for _, model := range s.models {
		pool, start := s.pools[model], 0
		for _, end := range pool.Groups {
			if pair := r.claimFresh(pool.Paired[start:end], now, home, free); pair != nil {
				return model, pair
			}
			start = end
		}
	}
	return "", nil
}

// claimFresh does ClaimFresh for one group.
func (r *Registry) claimFresh(rows []Row, now time.Time, home *Instance, free func(*Instance) bool) *Pair {
	for i := range rows {
		if rows[i].Facts.Roles&abi.RolePrefill == 0 || !free(rows[i].Instance) {
			continue
		}
		for j := range rows {
			p, d := rows[i].Target, rows[j].Target
			if home != nil && home != p.Instance && home != d.Instance {
				continue
			}
			if rows[j].Facts.Roles&abi.RoleDecode != 0 && p.Instance != d.Instance &&
				r.PairState(p, d) == abi.PairUnknown && free(d.Instance) {
				if pair := r.claim(p, d, now); pair != nil {
					return pair
				}
			}
		}
	}
	return nil
}

// full reports whether the table has no room for a new pair.
func (t *pairTable) full() bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return len(t.pairs) >= maxPairs
}

// claim returns the pair if it may be warmed up at now, and records the warm-up.
func (r *Registry) claim(p, d Target, now time.Time) *Pair {
	pair := r.Pair(p, d)
	pair.mu.Lock()
	defer pair.mu.Unlock()
	if now.Before(pair.next) || pair.Trial() || !pair.tried.CompareAndSwap(false, true) {
		return nil
	}
	pair.next = now.Add(min(warmAgain<<min(pair.warmUps, 10), warmAtLast))
	pair.warmUps++
	pair.noted = false
	pair.prove()
	return pair
}
