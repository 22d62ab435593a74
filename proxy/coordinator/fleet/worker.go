package fleet

import (
	"bytes"
	"context"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/wire"
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
	names names
	ids   []uint32
	batch uint64 // read that is being handled
	began time.Time

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
	dst = wire.AppendUint(dst, uint64(d.Needs))
	index := byte(0)
	if d.Index {
		index = 1
	}
	dst = append(dst, index)
	names := d.Headers[:min(len(d.Headers), abi.MaxAllHeaders)]
	dst = wire.AppendUint(dst, len(names))
	for _, name := range names {
		dst = wire.AppendText(dst, name)
	}
	return dst
}

func readDemand(b []byte) (d coordinator.Demand, err error) {
	r := newReader(b)
	d.Needs, d.Index = abi.Needs(r.Uint()), r.UintUpTo(1) != 0
	for range r.headerCount() {
		d.Headers = append(d.Headers, string(r.short(abi.MaxHeaderName)))
	}
	if !r.Done() {
		return d, link.Garbage("the needs of the coordinator's policies")
	}
	return d, nil
}

func (w *worker) row() WorkerRow {
	w.mu.Lock()
	defer w.mu.Unlock()
	return WorkerRow{Number: w.number, Slot: w.slot, Node: w.node, PID: w.pid, Since: w.since, Leases: len(w.leases)}
}

func (w *worker) tell(topic Topic, value []byte) error {
	return w.conn.Send(kindTopic, append([]byte{byte(topic)}, value...), true)
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

// Call implements link.Handler.
func (w *worker) Call(number uint32, kind uint8, payload []byte) error {
	switch kind {
	case kindPlace:
	case kindNamed, kindKeep, kindKept, kindTake, kindTook:
		return w.turnCall(number, kind, payload)
	case kindBudget:
		return w.budgetCall(number, payload)
	default:
		return link.Garbage("an unknown call")
	}
	if w.names == nil {
		w.names = make(names)
	}
	h := w.s.asks.Get().(*heard)
	if err := h.read(payload, w.s.own(), w.names); err != nil {
		return err
	}
	if !w.begin(h.lease) {
		return link.Garbage("a lease that there is")
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
	h.out = appendReply(h.out[:0], &h.Ask, p, err)
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
		p, err = w.s.o.Local.Place(w.ctx, &h.Ask)
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

// Message implements link.Handler.
func (w *worker) Message(kind uint8, payload []byte) error {
	r := newReader(payload)
	var err error
	switch kind {
	case kindDone:
		w.prefillDone(&r)
	case kindOwed:
		w.owe(r.Uint(), r.Rest())
	case kindAnswered:
		w.answered(&r)
	case kindComputed:
		w.computed(&r)
	case kindRelease:
		w.release(&r)
	case kindAdopt:
		err = w.adopt(&r)
	case kindUntake:
		w.untake(&r)
	case kindSettle:
		w.settle(&r)
	case kindCharge:
		w.charge(&r)
	case kindKnown:
		w.know(&r)
	case kindReport:
		if w.s.o.OnReport != nil {
			w.s.o.OnReport(w.number, payload)
		}
		return nil
	default:
		return link.Garbage("an unknown message")
	}
	if r.Failed() {
		return link.Garbage("a message about a lease")
	}
	return err
}

func (w *worker) prefillDone(r *reader) {
	lease, took := r.Uint(), r.duration()
	if l := w.owe(lease, r.Rest()); l.lease != nil {
		l.lease.PrefillDoneAfter(took)
	}
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

func (w *worker) answered(r *reader) {
	lease, took := r.Uint(), r.duration()
	if l := w.owe(lease, nil); l.lease != nil {
		l.lease.AnsweredAfter(took)
	}
}

func (w *worker) release(r *reader) {
	lease := r.Uint()
	w.mu.Lock()
	l := w.leases[lease]
	delete(w.leases, lease)
	w.mu.Unlock()
	if l.lease != nil {
		l.lease.Release()
	}
}

func (w *worker) adopt(r *reader) error {
	number, a, owed := readAdoption(r, w.s.own())
	if r.Failed() {
		return nil
	}
	if !w.begin(number) {
		return link.Garbage("a lease that there is")
	}
	l := lent{lease: new(coordinator.Lease)}
	w.s.o.Local.Adopt(l.lease, a)
	if len(owed) > 0 {
		l.owed = bytes.Clone(owed)
	}
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
func (w *worker) computed(r *reader) {
	lease, prompt, cached := r.Uint(), r.Int(), r.Int()
	block := int(r.UintUpTo(mostBlock))
	h := w.s.asks.Get().(*heard)
	defer w.s.asks.Put(h)
	h.room(0)
	h.blocks[0] = r.hashes(h.blocks[0][:0])
	w.mu.Lock()
	p := w.leases[lease].p
	w.mu.Unlock()
	if p != nil && !r.Failed() {
		w.s.o.Local.Compare(p, coordinator.CacheReport{Block: block, Blocks: h.blocks[0], Prompt: prompt, Cached: cached})
	}
}
