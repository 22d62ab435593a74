package fleet

import (
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
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

// maxGiven bounds the running requests of one worker that count, against a peer that never
// ends them.
const maxGiven = 1 << 20

// budgetCall answers a worker's call for a part of a tenant's budgets.
func (w *worker) budgetCall(number uint32, payload []byte) error {
	var m fleetpb.Budget
	if err := decode(payload, &m, "a call about a budget"); err != nil {
		return err
	}
	t := getTenant(m.Tenant)
	if _, full := w.gave(0); t == nil || w.s.o.Budgets == nil || full {
		return link.Garbage("a call about a budget")
	}
	if !w.s.succession.settle() {
		return w.conn.Answer(number, nil)
	}
	a := w.s.o.Budgets.Take(w.ctx, t, m.Tokens)
	if a.Refused == tenant.Admitted {
		w.give(m.Request, t, a.Reserved)
	}
	w.s.budgetsChanged()
	return w.conn.Answer(number, fleetpb.Append(nil, putBudget(&a, w.s.connected())))
}

// gave reports whether a request runs, and whether the worker has too many running requests.
func (w *worker) gave(request uint64) (open, full bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, open = w.budgets[request]
	return open, len(w.budgets) >= maxGiven
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
func (w *worker) settle(payload []byte) error {
	var m fleetpb.Settle
	if err := decode(payload, &m, "the end of a request with a budget"); err != nil {
		return err
	}
	w.mu.Lock()
	g, open := w.budgets[m.Request]
	delete(w.budgets, m.Request)
	w.mu.Unlock()
	if !open { // a request that was refused may be undone
		return nil
	}
	w.s.succession.do(func(l *tenant.Ledger) {
		l.Settle(g.tenant, tenant.Spent{Reserved: g.reserved, Used: m.Used, Undone: m.Undone})
	})
	w.s.budgetsChanged()
	return nil
}

// charge notes what the worker gave without this coordinator.
func (w *worker) charge(payload []byte) error {
	const what = "a part of a budget that the worker gave"
	var m fleetpb.Charge
	if err := decode(payload, &m, what); err != nil {
		return err
	}
	t := getTenant(m.Tenant)
	if open, full := w.gave(m.Request); t == nil || open || full || w.s.o.Budgets == nil {
		return link.Garbage(what)
	}
	running := 0
	if m.Request != 0 {
		running = 1
		w.give(m.Request, t, m.Reserved)
	}
	w.s.succession.do(func(l *tenant.Ledger) { l.Charge(t, m.Requests, m.Tokens, running) })
	w.s.budgetsChanged()
	return nil
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
func (w *worker) know(payload []byte) error {
	var m fleetpb.BudgetStates
	if err := decode(payload, &m, "states of budgets"); err != nil {
		return err
	}
	states, err := getStates(m.States)
	if err != nil || w.s.o.Budgets == nil {
		return link.Garbage("states of budgets")
	}
	w.s.succession.report(w.process, states)
	w.s.hear(&w.hears)
	return nil
}

// connected returns the number of workers.
func (s *Server) connected() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(1, len(s.workers))
}
