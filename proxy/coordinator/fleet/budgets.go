package fleet

import (
	"context"
	"errors"
	"sync"

	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// Budgets is the tenant.Budgets of a worker whose coordinator has the budgets. While the
// coordinator does not answer, the worker gives its share of each budget itself: the budget
// that the coordinator showed last, divided by the number of workers. It reports what it gave
// when a coordinator answers again. Safe for concurrent use.
type Budgets struct {
	client *Client
	local  *tenant.Ledger // the share of this worker

	mu      sync.Mutex
	session *session          // that knows all of running; nil: the coordinator is away; guarded by mu
	last    uint64            // number of the last request; guarded by mu
	sharers int               // workers that the coordinator has; guarded by mu
	known   tenant.Newest     // of the coordinators; guarded by mu
	running map[uint64]given  // guarded by mu
	owed    map[string]*debt  // by the tenant's name; what no coordinator knows yet; guarded by mu
	shares  map[string]shared // by the tenant's name; guarded by mu
}

// given is a running request.
type given struct {
	tenant   *tenant.Tenant
	share    *tenant.Tenant
	reserved int64
	known    bool // a coordinator has counted the request
}

// debt is what a tenant has used without the coordinator.
type debt struct {
	tenant           *tenant.Tenant
	requests, tokens int64
}

// shared is the share of a tenant for one of n workers.
type shared struct {
	of, share *tenant.Tenant
	n         int
}

// NewBudgets returns the budgets of the client's worker. Call it once for a client.
func NewBudgets(c *Client, local *tenant.Ledger) *Budgets {
	b := &Budgets{client: c, local: local, sharers: 1, running: make(map[uint64]given), owed: make(map[string]*debt), shares: make(map[string]shared)}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.budgets.Store(b)
	if s := c.session.Load(); s != nil {
		b.enter(s)
	}
	return b
}

// Take implements tenant.Budgets.
func (b *Budgets) Take(ctx context.Context, t *tenant.Tenant, tokens int64) tenant.Answer {
	b.mu.Lock()
	b.last++
	number, s := b.last, b.session
	b.mu.Unlock()
	if s != nil && !s.suspect() {
		if a, err := b.ask(ctx, s, number, t, tokens); err == nil {
			a.Number = number
			return a
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	share := b.shareOf(t)
	a := b.local.Take(ctx, share, tokens)
	a.Number = number
	if a.Refused == tenant.Admitted {
		g := given{tenant: t, share: share, reserved: a.Reserved}
		if b.session != nil { // it answers late, or has just come
			g.known = b.session.charge(number, g.tenant, 1, g.reserved, g.reserved)
		}
		b.running[number] = g
	}
	return a
}

// ask takes from the coordinator's budgets.
func (b *Budgets) ask(ctx context.Context, s *session, number uint64, t *tenant.Tenant, tokens int64) (a tenant.Answer, err error) {
	m := b.client.scratch.Get().(*scratch)
	defer b.client.release(m)
	m.out = fleetpb.Append(m.out[:0], &fleetpb.Budget{Request: number, Tenant: putTenant(t), Tokens: tokens})
	if err := s.call(ctx, fleetpb.Kind_KIND_BUDGET, m); err != nil {
		s.settle(number, tenant.Spent{Undone: true}, m) // the coordinator may have given it
		return a, err
	}
	a, sharers, err := readBudget(m.in)
	if errors.Is(err, link.ErrGarbage) {
		s.link.Close(err)
	}
	if err != nil {
		return a, err
	}
	a.State.Key = t.Key()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sharers = sharers
	g := given{tenant: t, share: b.shareOf(t), reserved: a.Reserved, known: true}
	b.local.Copy(&a, sharers)
	b.known.Add(a.State)
	if a.Refused != tenant.Admitted {
		return a, nil
	}
	if b.session != nil && b.session != s { // another coordinator came meanwhile
		b.session.charge(number, t, 0, 0, a.Reserved)
	}
	b.running[number] = g
	return a, nil
}

// Settle implements tenant.Budgets.
func (b *Budgets) Settle(t *tenant.Tenant, spent tenant.Spent) {
	b.mu.Lock()
	defer b.mu.Unlock()
	g, open := b.running[spent.Number]
	if !open {
		return
	}
	delete(b.running, spent.Number)
	b.local.Settle(g.share, spent)
	if b.session != nil && g.known {
		m := b.client.scratch.Get().(*scratch)
		defer b.client.release(m)
		if b.session.settle(spent.Number, spent, m) {
			return
		}
	}
	d := b.owed[t.Name]
	if d == nil {
		d = &debt{tenant: t}
		b.owed[t.Name] = d
	}
	if d.tokens += spent.Used; g.known {
		d.tokens -= g.reserved
	}
	switch {
	case g.known && spent.Undone:
		d.requests--
	case !g.known && !spent.Undone:
		d.requests++
	}
}

// tell notes states of budgets that the coordinator has published. nil is allowed.
func (b *Budgets) tell(states []tenant.State) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.known.Add(states...)
	b.local.CopyShares(states, b.sharers)
}

// enter tells a coordinator that has just answered about the budgets of its predecessors, about
// all running requests, and what the worker gave meanwhile. nil is allowed.
func (b *Budgets) enter(s *session) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	known := &fleetpb.BudgetStates{States: putStates(b.known.States())}
	_ = s.link.Send(kindOf(fleetpb.Kind_KIND_KNOWN), fleetpb.Append(nil, known), false) // fails if the connection has ended
	for number, g := range b.running {
		requests, tokens := int64(0), int64(0)
		if !g.known {
			requests, tokens = 1, g.reserved
		}
		g.known = s.charge(number, g.tenant, requests, tokens, g.reserved)
		b.running[number] = g
	}
	for name, d := range b.owed {
		if s.charge(0, d.tenant, d.requests, d.tokens, 0) {
			delete(b.owed, name)
		}
	}
	b.session = s
}

// leave notes that a coordinator is away. nil is allowed.
func (b *Budgets) leave(s *session) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.session == s {
		b.session = nil
	}
}

// shareOf returns this worker's share of a tenant. The caller holds mu.
func (b *Budgets) shareOf(t *tenant.Tenant) *tenant.Tenant {
	if has := b.shares[t.Name]; has.of == t && has.n == b.sharers {
		return has.share
	}
	has := shared{of: t, share: t.Share(b.sharers), n: b.sharers}
	b.shares[t.Name] = has
	return has.share
}

// charge tells the coordinator what it does not know of a tenant, and of the running request
// of that number; 0: of none. False: the connection has ended.
func (s *session) charge(number uint64, t *tenant.Tenant, requests, tokens, reserved int64) bool {
	m := &fleetpb.Charge{Request: number, Tenant: putTenant(t), Requests: requests, Tokens: tokens, Reserved: reserved}
	return s.link.Send(kindOf(fleetpb.Kind_KIND_CHARGE), fleetpb.Append(nil, m), false) == nil
}

// settle tells the coordinator what a request has used. False: the connection has ended.
func (s *session) settle(number uint64, spent tenant.Spent, m *scratch) bool {
	m.out = fleetpb.Append(m.out[:0], &fleetpb.Settle{Request: number, Used: spent.Used, Undone: spent.Undone})
	return s.link.Send(kindOf(fleetpb.Kind_KIND_SETTLE), m.out, false) == nil
}
