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
// instances are both free, and a model that they serve. If home is not nil, it is one
// of the two instances. The pair is not returned again for a while.
func (r *Registry) ClaimFresh(now time.Time, home *Instance, free func(*Instance) bool) (model string, p, d Target, ok bool) {
	s := r.Snapshot()
	for _, model := range s.models {
		pool, start := s.pools[model], 0
		for _, end := range pool.Groups {
			if p, d, ok := r.claimFresh(pool.Paired[start:end], now, home, free); ok {
				return model, p, d, true
			}
			start = end
		}
	}
	return "", Target{}, Target{}, false
}

// claimFresh does ClaimFresh for one group.
func (r *Registry) claimFresh(rows []Row, now time.Time, home *Instance, free func(*Instance) bool) (p, d Target, ok bool) {
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
				r.PairState(p, d) == abi.PairUnknown && free(d.Instance) && r.pairs.claim(p, d, now) {
				return p, d, true
			}
		}
	}
	return p, d, false
}

// claim reports whether the pair may be warmed up at now, and records the warm-up. It
// returns false for a pair for which the table has no room.
func (t *pairTable) claim(p, d Target, now time.Time) bool {
	t.mu.RLock()
	full := len(t.pairs) >= maxPairs
	t.mu.RUnlock()
	if full {
		return false
	}
	pair := t.get(p, d)
	pair.mu.Lock()
	defer pair.mu.Unlock()
	if now.Before(pair.next) {
		return false
	}
	pair.next = now.Add(min(warmAgain<<min(pair.warmUps, 10), warmAtLast))
	pair.warmUps++
	return true
}
