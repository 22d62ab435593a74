package coordinator

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

// Adoption is a placement that another coordinator made, or one that this coordinator made
// for a worker whose connection has since broken.
type Adoption struct {
	Prefill, Decode engine.Target // zero if the engine is not known here
	ID              uint64        // the disagg id; 0: none
	Charge
}

// Adopt makes lease, which must be zero, hold a placement as if it had been made here now.
func (l *Local) Adopt(lease *Lease, a Adoption) {
	lease.local, lease.id = l, a.ID
	if a.ID != 0 {
		l.live.Hold(a.ID)
	}
	lease.carry(a.Prefill, a.Decode, a.Charge, time.Now())
	l.open.Add(1)
}
