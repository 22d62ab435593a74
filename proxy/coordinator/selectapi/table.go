package selectapi

import (
	"container/list"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
)

// reservationID identifies a reservation by the worker's req_id in decimal, or by a
// handle that this handler made.
type reservationID struct {
	phase  abi.Phase
	handle bool
	text   string
}

// reservation is a lease that a worker must finish.
type reservation struct {
	id    reservationID
	lease *coordinator.Lease
	until time.Time
}

// table has the open reservations. A caller that gets a lease from the table must release
// the lease. Safe for concurrent use.
type table struct {
	mu     sync.Mutex
	byID   map[reservationID]*list.Element // guarded by mu
	order  *list.List                      // of *reservation, in the order of expiry; guarded by mu
	closed bool                            // add fails; guarded by mu
}

func newTable() *table {
	return &table{byID: map[reservationID]*list.Element{}, order: list.New()}
}

func (t *table) len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.byID)
}

// add adds a lease. earlier is the replaced lease of the same id, nil if there was none.
// False: there are too many reservations, or the table is closed.
func (t *table) add(id reservationID, lease *coordinator.Lease, now time.Time) (earlier *coordinator.Lease, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	earlier = t.remove(id)
	if t.closed || len(t.byID) >= maxOpen {
		return earlier, false
	}
	t.byID[id] = t.order.PushBack(&reservation{id, lease, now.Add(Expiry)})
	return earlier, true
}

// take removes a reservation and returns its lease, nil if there is none.
func (t *table) take(id reservationID) *coordinator.Lease {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.remove(id)
}

// remove is take for callers that hold t.mu.
func (t *table) remove(id reservationID) *coordinator.Lease {
	e := t.byID[id]
	if e == nil {
		return nil
	}
	delete(t.byID, id)
	return t.order.Remove(e).(*reservation).lease
}

// renew restarts the time until a reservation expires. False: the reservation does not
// exist.
func (t *table) renew(id reservationID, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.byID[id]
	if e == nil {
		return false
	}
	e.Value.(*reservation).until = now.Add(Expiry)
	t.order.MoveToBack(e)
	return true
}

// expire removes and returns the expired leases.
func (t *table) expire(now time.Time) (leases []*coordinator.Lease) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for e := t.order.Front(); e != nil && now.After(e.Value.(*reservation).until); e = t.order.Front() {
		leases = append(leases, t.remove(e.Value.(*reservation).id))
	}
	return leases
}

// close removes and returns all leases; add fails from then on.
func (t *table) close() (leases []*coordinator.Lease) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	for e := t.order.Front(); e != nil; e = t.order.Front() {
		leases = append(leases, t.remove(e.Value.(*reservation).id))
	}
	return leases
}
