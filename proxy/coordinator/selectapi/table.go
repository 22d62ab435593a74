package selectapi

import (
	"container/list"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
)

// reservationID identifies a reservation: the worker's req_id in decimal, or a handle made
// here.
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

// table has the open reservations. The caller that takes a lease out must release it. Safe
// for concurrent use.
type table struct {
	mu     sync.Mutex
	byID   map[reservationID]*list.Element // guarded by mu
	order  *list.List                      // of *reservation, the first to expire first; guarded by mu
	closed bool                            // no lease is added any more; guarded by mu
}

func newTable() *table {
	return &table{byID: map[reservationID]*list.Element{}, order: list.New()}
}

func (t *table) len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.byID)
}

// add adds a lease. earlier is the replaced lease of the same id. False: there are too
// many, or the table is closed.
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

// remove is take; t.mu is held.
func (t *table) remove(id reservationID) *coordinator.Lease {
	e := t.byID[id]
	if e == nil {
		return nil
	}
	delete(t.byID, id)
	return t.order.Remove(e).(*reservation).lease
}

// renew restarts the life of a reservation; false: there is none.
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
