package coordinator

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

// Adoption is a placement that another coordinator made, or this one for a worker
// that it has lost since.
type Adoption struct {
	Prefill, Decode engine.Target // either may be zero: its engine is not known here
	ID              uint64        // the disagg id; 0: none
	Charge
}

// Adopt makes lease, whose zero value it gets, hold a placement as if it had been made
// here now.
func (l *Local) Adopt(lease *Lease, a Adoption) {
	lease.local, lease.id = l, a.ID
	if a.ID != 0 {
		l.live.Hold(a.ID)
	}
	lease.carry(a.Prefill, a.Decode, a.Charge, time.Now())
	l.open.Add(1)
}
