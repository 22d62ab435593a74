package coordinator

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

// Lend gives p, a placement that another process decided, empty Facts.Candidates and
// Targets with memory to append to. Recycle takes that memory back.
func (l *Local) Lend(p *Placement) {
	t := l.tables.Get().(*table)
	p.table, p.Facts.Candidates, p.Targets = t, t.place.Candidates[:0], t.targets[:0]
}

// Snapshot returns the engines that placements are made on now.
func (l *Local) Snapshot() *engine.Snapshot { return l.registry.Snapshot() }

// Adoption is a placement that another coordinator made, or one that this coordinator made
// for a worker whose connection has since broken.
type Adoption struct {
	Prefill, Decode engine.Target // zero if the engine is not known here
	ID              uint64        // the disagg id; 0: none
	Charge
}

// Adopt makes lease, which must be zero, hold a placement as if it had been made here now.
func (l *Local) Adopt(lease *Lease, a Adoption) {
	lease.of, lease.id = &l.leases, a.ID
	if a.ID != 0 {
		l.leases.live.Hold(a.ID)
	}
	lease.carry(a.Prefill, a.Decode, a.Charge, time.Now())
	l.leases.open.Add(1)
}
