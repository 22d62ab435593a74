package fleet

import (
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// givenBudgets are the parts of budgets that the running requests of a worker have, by its
// number. The map may be nil.
type givenBudgets map[uint64]taken

// taken is the part of one request.
type taken struct {
	tenant   *tenant.Tenant
	reserved int64
}

// mostGiven bounds the running requests of one worker that count, against a peer that never
// ends them.
const mostGiven = 1 << 20

// budgetCall answers a worker's call for a part of a tenant's budgets.
func (w *worker) budgetCall(number uint32, payload []byte) error {
	r := newReader(payload)
	request, t, tokens := r.Uint(), r.tenant(), r.Int()
	if _, full := w.gave(0); !r.Done() || w.s.o.Budgets == nil || full {
		return link.Garbage("a call about a budget")
	}
	if !w.s.succession.settle() {
		return w.conn.Answer(number, []byte{unsettled})
	}
	a := w.s.o.Budgets.Take(w.ctx, t, tokens)
	if a.Refused == tenant.Admitted {
		w.give(request, t, a.Reserved)
	}
	w.s.budgetsChanged()
	return w.conn.Answer(number, appendBudget(nil, &a, w.s.connected()))
}

// gave reports whether a request runs, and whether the worker has too many running requests.
func (w *worker) gave(request uint64) (open, full bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, open = w.budgets[request]
	return open, len(w.budgets) >= mostGiven
}

func (w *worker) give(request uint64, t *tenant.Tenant, reserved int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.budgets == nil {
		w.budgets = make(givenBudgets)
	}
	w.budgets[request] = taken{t, reserved}
}

// settle ends a request of the worker.
func (w *worker) settle(r *reader) {
	request, used, undone := r.Uint(), r.Int(), r.UintUpTo(1) != 0
	w.mu.Lock()
	g, open := w.budgets[request]
	if open = open && !r.Failed(); open {
		delete(w.budgets, request)
	}
	w.mu.Unlock()
	if !open { // a request that was refused may be undone
		return
	}
	w.s.succession.do(func(l *tenant.Ledger) {
		l.Settle(g.tenant, tenant.Spent{Reserved: g.reserved, Used: used, Undone: undone})
	})
	w.s.budgetsChanged()
}

// charge notes what the worker gave without this coordinator.
func (w *worker) charge(r *reader) {
	request, t := r.Uint(), r.tenant()
	requests, tokens, reserved := r.Int(), r.Int(), r.Int()
	if open, full := w.gave(request); open || full || w.s.o.Budgets == nil {
		r.Fail()
	}
	if r.Failed() {
		return
	}
	running := 0
	if request != 0 {
		running = 1
		w.give(request, t, reserved)
	}
	w.s.succession.do(func(l *tenant.Ledger) { l.Charge(t, requests, tokens, running) })
	w.s.budgetsChanged()
}

// end frees the places of a worker that has disconnected. What its requests reserved stays
// used; if the worker still runs, it tells the next coordinator about them.
func (g givenBudgets) end(s *succession) {
	for _, one := range g {
		s.do(func(l *tenant.Ledger) {
			l.Settle(one.tenant, tenant.Spent{Reserved: one.reserved, Used: one.reserved})
		})
	}
}

// know notes the newest states of budgets that a worker knows. The worker receives later ones
// from then on.
func (w *worker) know(r *reader) {
	states := r.states()
	if !r.Done() || w.s.o.Budgets == nil {
		r.Fail()
		return
	}
	w.s.succession.report(w.process, states)
	w.s.hear(&w.hears)
}

// connected returns the number of workers.
func (s *Server) connected() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(1, len(s.workers))
}
