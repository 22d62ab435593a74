package engine

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// NoRoom notes that t has refused a request for lack of room, before the lease of the request is
// released. Placements prefer other targets for a moment.
func (r *Registry) NoRoom(t Target) {
	t.Load[t.Rank].NoRoom(time.Now())
	if r.reports != nil {
		r.reports.tell(report{kind: fleetpb.Observed_OBSERVED_NO_ROOM, p: t})
	}
}
