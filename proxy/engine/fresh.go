package engine

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// A pair whose warm-up failed gets another after warmAgain, then after twice
// that, and so on up to warmAtLast.
const (
	warmAgain  = 2 * time.Second
	warmAtLast = 2 * time.Minute
)

// Free reports that nothing is in flight on any rank of the instance, by our
// count and by its own.
func (i *Instance) Free(now time.Time) bool {
	for rank := range i.Load {
		if i.Load[rank].View(now).Requests != 0 {
			return false
		}
	}
	return true
}

// ClaimFresh returns a pair of ready targets through which nothing has come yet,
// both of whose instances are free, and a model that they serve. One of the
// instances is home, unless that is nil. The pair is not returned again for a
// while.
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

// claimFresh is ClaimFresh in one group.
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

// claim reports whether the pair may be warmed up at now, and notes that it is.
// Pairs that the table has no room for are left alone.
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
