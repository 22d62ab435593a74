package fleet

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// worker is the coordinator's side of a worker's connection: the Handler of its frames,
// and its leases.
type worker struct {
	s      *Server
	conn   *link.Conn
	ctx    context.Context // the context of Serve
	number int
	peer
	since  time.Time
	beside sync.WaitGroup // placements, each in a separate goroutine

	// Used by the connection's reader only.
	names  names
	update fleetpb.LeaseUpdate
	batch  uint64 // read that is being handled
	began  time.Time

	formsMu sync.Mutex
	forms   coordinator.Demand // last sent; guarded by formsMu
	told    bool               // forms was sent; guarded by formsMu

	mu      sync.Mutex
	leases  map[uint64]lent // by the worker's number; nil after the connection has ended; guarded by mu
	budgets givenBudgets    // guarded by mu
	hears   bool            // the states of budgets; guarded by Server.mu
	passing passingTurns    // guarded by mu
}

// lent is a lease of a worker.
type lent struct {
	lease *coordinator.Lease     // nil while it is being placed
	p     *coordinator.Placement // nil if the lease was adopted
	owed  []byte                 // its clean-up, until the answer begins; nil: none
}

func appendDemand(dst []byte, d coordinator.Demand) []byte {
	return fleetpb.Append(dst, &fleetpb.Demand{
		Needs: uint64(d.Needs), Index: d.Index, Headers: d.Headers[:min(len(d.Headers), abi.MaxAllHeaders)],
	})
}

func readDemand(b []byte) (d coordinator.Demand, err error) {
	const what = "the needs of the coordinator's policies"
	var m fleetpb.Demand
	if err := decode(b, &m, what); err != nil {
		return d, err
	}
	if len(m.Headers) > abi.MaxAllHeaders || slices.ContainsFunc(m.Headers, func(h string) bool { return len(h) > abi.MaxHeaderName }) {
		return d, link.Garbage(what)
	}
	return coordinator.Demand{Needs: abi.Needs(m.Needs), Index: m.Index, Headers: m.Headers}, nil
}

func (w *worker) row() WorkerRow {
	w.mu.Lock()
	defer w.mu.Unlock()
	return WorkerRow{Number: w.number, Slot: w.slot, Node: w.node, PID: w.pid, Since: w.since, Leases: len(w.leases)}
}

func (w *worker) tell(topic Topic, value []byte) error {
	return w.conn.Send(kindOf(fleetpb.Kind_KIND_TOPIC), fleetpb.Append(nil, &fleetpb.Topic{Topic: uint32(topic), Value: value}), true)
}

// tellForms sends d if the worker does not have it yet.
func (w *worker) tellForms(d coordinator.Demand) {
	w.formsMu.Lock()
	defer w.formsMu.Unlock()
	if !w.told || !d.Equal(&w.forms) {
		w.forms, w.told = d, true
		w.tell(TopicForms, appendDemand(nil, d))
	}
}

// slowBatch is how long the placements of one batch may delay the rest of the batch.
const slowBatch = 200 * time.Microsecond

// Call implements link.Handler. A call of a later version gets an empty answer.
func (w *worker) Call(number uint32, kind uint8, payload []byte) error {
	switch k := fleetpb.Kind(kind); k {
	case fleetpb.Kind_KIND_PLACE:
		return w.placeCall(number, payload)
	case fleetpb.Kind_KIND_TURN_NAMED, fleetpb.Kind_KIND_TURN_STORE, fleetpb.Kind_KIND_TURN_STORED, fleetpb.Kind_KIND_TURN_CLAIM, fleetpb.Kind_KIND_TURN_CLAIMED:
		return w.turnCall(number, k, payload)
	case fleetpb.Kind_KIND_BUDGET:
		return w.budgetCall(number, payload)
	}
	return w.conn.Answer(number, nil)
}

func (w *worker) placeCall(number uint32, payload []byte) error {
	if w.names == nil {
		w.names = make(names)
	}
	h := w.s.asks.Get().(*heard)
	if err := h.read(payload, w.s.own(), w.names); err != nil {
		return err
	}
	if h.lease == 0 || !w.begin(h.lease) {
		return link.Garbage("a lease without a number of its own")
	}
	if w.slow() {
		w.beside.Go(func() {
			w.place(number, h)
			w.conn.Flush()
		})
		return nil
	}
	w.place(number, h)
	return nil
}

// slow reports whether the present batch has taken long. The calls of a batch are answered
// together; with a slow policy the rest of the batch runs in goroutines.
func (w *worker) slow() bool {
	now := time.Now()
	if n := w.conn.Reads(); n != w.batch {
		w.batch, w.began = n, now
		return false
	}
	return now.Sub(w.began) > slowBatch
}

// place answers a call for a placement.
func (w *worker) place(number uint32, h *heard) {
	p, err := w.decide(h)
	w.tellForms(w.s.o.Local.Demand())
	h.out = appendPlaced(h.out[:0], &h.placed, &h.PlacementRequest, p, err)
	if p != nil {
		p.Recycle()
		if !w.placed(h.lease, p) {
			p.Lease.Release()
		}
	}
	w.conn.Answer(number, h.out)
	h.drop()
	w.s.asks.Put(h)
}

func (w *worker) decide(h *heard) (p *coordinator.Placement, err error) {
	switch {
	case !h.lost:
		p, err = w.s.o.Local.Place(w.ctx, &h.PlacementRequest)
	case h.Only.Decode.IsZero() && h.Only.Prefill.IsZero():
		err = &coordinator.NoTargetError{Phase: abi.Prefill}
	default:
		err = &coordinator.NoTargetError{}
	}
	if err != nil {
		w.mu.Lock()
		delete(w.leases, h.lease)
		w.mu.Unlock()
	}
	return p, err
}

// begin notes that a lease is being placed; false: the number is in use.
func (w *worker) begin(lease uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, taken := w.leases[lease]; taken || w.leases == nil {
		return w.leases == nil // the connection has ended, which is not the worker's fault
	}
	w.leases[lease] = lent{}
	return true
}

// placed gives the lease to the worker; false: the worker has released it or disconnected.
func (w *worker) placed(lease uint64, p *coordinator.Placement) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, wanted := w.leases[lease]; !wanted {
		return false
	}
	w.leases[lease] = lent{lease: p.Lease, p: p}
	return true
}

// end releases all leases, frees the turns that were not taken, and returns the clean-ups
// of the leases. A connection that was replaced may still read a last frame after end; the end of
// its reader calls end again.
func (w *worker) end() (owed [][]byte) {
	w.mu.Lock()
	leases, passing, budgets := w.leases, w.passing, w.budgets
	w.leases, w.passing, w.budgets = nil, passingTurns{}, nil
	w.mu.Unlock()
	passing.forget(w.s)
	budgets.end(&w.s.succession)
	for _, l := range leases {
		if l.lease != nil {
			l.lease.Release()
		}
		if len(l.owed) > 0 {
			owed = append(owed, l.owed)
		}
	}
	return owed
}

// Message implements link.Handler. It ignores the kinds of later versions.
func (w *worker) Message(kind uint8, payload []byte) error {
	switch k := fleetpb.Kind(kind); k {
	case fleetpb.Kind_KIND_DONE, fleetpb.Kind_KIND_CLEANUP, fleetpb.Kind_KIND_ANSWERED, fleetpb.Kind_KIND_RELEASE:
		return w.updateLease(k, payload)
	case fleetpb.Kind_KIND_COMPUTED:
		return w.computed(payload)
	case fleetpb.Kind_KIND_ADOPT:
		return w.adopt(payload)
	case fleetpb.Kind_KIND_TURN_CANCEL:
		return w.cancelTurn(payload)
	case fleetpb.Kind_KIND_SETTLE:
		return w.settle(payload)
	case fleetpb.Kind_KIND_CHARGE:
		return w.charge(payload)
	case fleetpb.Kind_KIND_KNOWN:
		return w.know(payload)
	case fleetpb.Kind_KIND_REPORT:
		if w.s.o.OnReport != nil {
			w.s.o.OnReport(w.number, payload)
		}
	}
	return nil
}

func (w *worker) updateLease(kind fleetpb.Kind, payload []byte) error {
	m := &w.update
	defer m.ResetVT()
	if fleetpb.UnmarshalView(payload, m, maxRecords) != nil {
		return link.Garbage("a message about a lease")
	}
	if kind == fleetpb.Kind_KIND_RELEASE {
		w.release(m.Lease)
		return nil
	}
	cleanup := m.Cleanup
	if kind == fleetpb.Kind_KIND_ANSWERED {
		cleanup = nil
	}
	l := w.owe(m.Lease, cleanup)
	switch {
	case l.lease == nil:
	case kind == fleetpb.Kind_KIND_DONE:
		l.lease.PrefillDoneAfter(durationOf(m.TookUs))
	case kind == fleetpb.Kind_KIND_ANSWERED:
		l.lease.AnsweredAfter(durationOf(m.TookUs))
	}
	return nil
}

// owe replaces the clean-up of a lease by a copy of cleanup, and returns the lease. Empty: the lease
// has no clean-up.
func (w *worker) owe(lease uint64, cleanup []byte) lent {
	w.mu.Lock()
	defer w.mu.Unlock()
	l, ok := w.leases[lease]
	if ok && (len(cleanup) > 0 || l.owed != nil) {
		l.owed = append([]byte(nil), cleanup...)
		w.leases[lease] = l
	}
	return l
}

func (w *worker) release(lease uint64) {
	w.mu.Lock()
	l := w.leases[lease]
	delete(w.leases, lease)
	w.mu.Unlock()
	if l.lease != nil {
		l.lease.Release()
	}
}

func (w *worker) adopt(payload []byte) error {
	var m fleetpb.Adoption
	if err := decode(payload, &m, "an adopted lease"); err != nil {
		return err
	}
	number := m.Lease
	if number == 0 || !w.begin(number) {
		return link.Garbage("a lease without a number of its own")
	}
	l := lent{lease: new(coordinator.Lease), owed: m.Cleanup}
	w.s.o.Local.Adopt(l.lease, readAdoption(&m, w.s.own()))
	w.mu.Lock()
	gone := w.leases == nil
	if !gone {
		w.leases[number] = l
	}
	w.mu.Unlock()
	if gone {
		l.lease.Release()
	}
	return nil
}

// computed compares an engine's report with the index, if the placement was made here.
func (w *worker) computed(payload []byte) error {
	h := w.s.asks.Get().(*heard)
	defer w.s.asks.Put(h)
	m := &h.cached
	defer m.ResetVT()
	if fleetpb.UnmarshalView(payload, m, maxRecords) != nil {
		return link.Garbage("a report about a cache")
	}
	w.mu.Lock()
	p := w.leases[m.Lease].p
	w.mu.Unlock()
	if p != nil {
		w.s.o.Local.Compare(p, coordinator.CacheReport{
			Block: int(min(m.Block, maxBlock)), Blocks: hashes(m.Blocks), Prompt: m.Prompt, Cached: m.Cached,
		})
	}
	m.Blocks = kept(m.Blocks)
	return nil
}
