package coordinator

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// fillCosts computes the present costs of one leg and of two legs for the plan policy.
func (t *table) fillCosts(pool *engine.Pool, now time.Time) {
	f := &t.plan
	var transfer, handover mean
	f.PrefillCached, f.PrefillQueued, f.PrefillMicros = t.costs(pool.Paired, abi.RolePrefill, now, func(target engine.Target) {
		transfer.add(target.Transfers.PerToken())
		handover.add(target.Transfers.Fixed())
	})
	f.BothCached, f.BothQueued, f.BothMicros = t.costs(pool.Both, abi.RoleBoth, now, func(engine.Target) {})
	f.TransferMicros, f.HandoverMicros = transfer.of(), handover.of()
}

// costs returns, over the rows with one of the roles: the most prompt tokens that a row
// holds, the fewest tokens that wait at a row, and the mean time per token.
func (t *table) costs(rows []engine.Row, roles abi.Role, now time.Time, visit func(engine.Target)) (cached, queued int64, micros float32) {
	var speed mean
	queued = -1
	for i := range rows {
		r := &rows[i]
		if r.Facts.Roles&roles == 0 {
			continue
		}
		if m, chain := t.held(r.Target); chain != nil {
			cached = max(cached, int64(m.Blocks())*int64(TokensOf(chain.Form)))
		}
		load := r.Load[r.Rank].View(now)
		if queued < 0 || load.Queued < queued {
			queued = load.Queued
		}
		speed.add(load.PrefillMicros)
		visit(r.Target)
	}
	return cached, max(0, queued), speed.of()
}

// mean is the mean of the known values; 0 is unknown.
type mean struct {
	sum float32
	n   int
}

func (m *mean) add(v float32) {
	if v > 0 {
		m.sum += v
		m.n++
	}
}

func (m *mean) of() float32 {
	if m.n == 0 {
		return 0
	}
	return m.sum / float32(m.n)
}
