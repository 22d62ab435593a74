package admission

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Queue lets limits.max_exchanges requests run, lets limits.queue requests wait, and limits
// the open requests of one client. Free places go to the priority classes and to the tenants
// by the tokens that they have received (see fair). While the engines of a model are saturated,
// its requests wait too, and those of other models pass them. The limits may differ from call to
// call, because a reload may change them. The zero value is empty. Safe for concurrent use.
type Queue struct {
	// Saturated judges the models of claims. It must be set before the first claim with a
	// model, and not change.
	Saturated Saturated
	// Evict asks the policy for claims with Evicts. It must be set before the first of them.
	Evict Evict

	mu      sync.Mutex
	running int                     // guarded by mu
	order   fair                    // of the waiting requests; guarded by mu
	clients map[string]openRequests // guarded by mu; only clients with counted requests
	limit   int                     // guarded by mu; MaxExchanges of the last call
	tickets uint64                  // guarded by mu; how many requests have waited

	watching bool // a timer will look at the gates; guarded by mu
	looks    int  // of the timer; guarded by mu

	wanting []*ticket    // for which the evict policy decides next; guarded by mu
	asking  bool         // a goroutine asks for them; guarded by mu
	ending  []*Evictable // evicted, and with their places; guarded by mu
}

// Claim describes a request that wants a place.
type Claim struct {
	Client string               // for limits.per_client
	Class  config.PriorityClass // Weight must be above 0
	Tenant string               // shares the places of the class; "": Client
	Weight float64              // of the tenant; 0: 1
	Tokens int64                // that the request is expected to use; below 1: 1
	Model  string               // whose engines may be saturated; "": saturation does not count
	Prompt int64                // tokens of the prompt, for the evict policy
	Evicts bool                 // the request may end a running one of a lower class
	// Evictable is the request while it runs; nil: it cannot be ended for another one.
	Evictable *Evictable
	Sheddable bool   // the request is refused instead of waiting
	Gated     func() // called when the request begins to wait because of saturation; nil: nobody asks
}

// Place is a place among the running requests. The zero value is no place.
type Place struct {
	queue     *Queue
	client    string
	class     *class
	flow      *flow      // nil: the request has not waited, and no request has waited then
	gate      *gate      // nil: none, or the request has come to an engine
	evictable *Evictable // nil: the request cannot be ended for another one
	booked    int64
	memory    uint64 // of the order, in which the request is charged
	charged   bool
	capped    bool // the client's requests are counted
}

// openRequests counts the open requests of one client.
type openRequests struct{ all, waiting int }

// ticket is one place in the queue. decided is closed when the request may run, or is refused.
type ticket struct {
	decided  chan struct{}
	refusal  error // nil: the request may run; set before decided is closed
	place    Place
	prompt   int64 // tokens, of the claim
	arrived  time.Time
	until    time.Time  // the end of queue_timeout
	deadline time.Time  // of the first token; zero: none
	number   uint64     // in order of arrival
	waits    bool       // in the order of the queue; guarded by mu of the queue
	victim   *Evictable // ends for this request; nil: none does; guarded by mu of the queue
}

// Refusals of Enter. Their codes are the reasons of pdproxy_shed_total.
var (
	ErrQueueFull    = openai.NewError(openai.CodeQueueFull, "too many requests are running and waiting")
	ErrQueueTimeout = openai.NewError(openai.CodeQueueTimeout, "no place became free in time")
	ErrDeadline     = openai.NewError(openai.CodeDeadlineExceeded, "the deadline of the request passed while the request waited")
	ErrClientLimit  = openai.NewError(openai.CodeClientLimit, "this client has too many requests open")
)

// Enter waits until the request may run. On success the caller must call Leave of the place
// exactly once, when the request ends. The error is one of the refusals, or the cause of ctx.
func (q *Queue) Enter(ctx context.Context, c Claim, l config.Limits) (Place, error) {
	q.mu.Lock()
	q.limit = l.MaxExchanges
	if q.order.waiting > 0 {
		q.admit() // the limit may be higher than before
	}
	var g *gate
	if c.Model != "" {
		if g = q.order.gate(c.Model); g.waiting == 0 { // admit has looked at the others
			q.look(g)
		}
	}
	p := Place{gate: g, queue: q, client: c.Client, capped: l.PerClient > 0, class: q.order.class(c.Class), booked: max(1, c.Tokens), evictable: c.Evictable}
	tenant := cmp.Or(c.Tenant, c.Client)
	if r := p.evictable; r != nil {
		r.model, r.tenant, r.tokens = c.Model, abi.LabelID(tenant), c.Prompt
	}
	if p.capped {
		if q.clients == nil {
			q.clients = make(map[string]openRequests)
		}
		has := q.clients[c.Client]
		if has.all >= l.PerClient {
			q.order.release(g)
			q.mu.Unlock()
			return Place{}, ErrClientLimit
		}
		has.all++ // waiting requests count, too
		q.clients[c.Client] = has
	}
	open := g == nil || !g.closed
	if open && q.running < l.MaxExchanges && (p.class.MaxShare >= 1 || p.class.mayRun(l.MaxExchanges)) { // then no request of the class and the model waits
		if q.order.waiting > 0 {
			p.flow = p.class.flow(tenant, cmp.Or(c.Weight, 1))
			q.order.serve(&p)
		}
		q.run(&p)
		q.mu.Unlock()
		return p, nil
	}
	p.flow = p.class.flow(tenant, cmp.Or(c.Weight, 1))
	if open {
		c.Gated = nil
	}
	return q.wait(ctx, p, c, l) // unlocks
}

// run counts the request of p as running. The caller holds mu.
func (q *Queue) run(p *Place) {
	q.running++
	p.class.running++
	if p.gate != nil {
		p.gate.unsent++
	}
	if p.evictable != nil {
		p.list()
	}
}

// Charged reports whether Leave corrects the expected tokens of the request by the used ones.
func (p *Place) Charged() bool { return p.charged }

// Leave gives the place back. used is how many tokens the request has used; below 1: as many
// as were expected. Leave of a zero Place does nothing.
func (p *Place) Leave(used int64) {
	q := p.queue
	if q == nil {
		return
	}
	if p.capped {
		q.forget(p.client)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if used > 0 && p.charged {
		q.order.correct(p, used)
	}
	q.running--
	p.class.running--
	if p.gate != nil {
		p.sent()
	}
	p.queue = nil
	if p.evictable != nil {
		q.left(p.evictable)
	}
	if q.order.waiting > 0 {
		q.admit()
	}
}

// forget removes one request from the count of a client.
func (q *Queue) forget(client string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	has := q.clients[client]
	if has.all--; has.all == 0 {
		delete(q.clients, client)
		return
	}
	q.clients[client] = has
}

// countWaiting adds n to the waiting requests of the ticket's client. The caller holds
// mu.
func (q *Queue) countWaiting(t *ticket, n int) {
	if t.place.capped {
		has := q.clients[t.place.client]
		has.waiting += n
		q.clients[t.place.client] = has
	}
}

// wait queues the caller, who holds mu. mu is released when wait returns.
func (q *Queue) wait(ctx context.Context, p Place, c Claim, l config.Limits) (Place, error) {
	limit := time.Duration(l.QueueTimeout)
	t := &ticket{decided: make(chan struct{}), place: p, prompt: c.Prompt, arrived: time.Now(), number: q.tickets}
	t.until = t.arrived.Add(limit)
	t.deadline, _ = ctx.Deadline()
	instead, err := q.mayWait(t, c.Sheddable, l)
	if err == nil {
		q.tickets++
		q.order.add(t)
		q.countWaiting(t, 1)
		if instead != nil {
			q.refuse(instead)
		}
		q.watch()
		if c.Evicts {
			q.wantEviction(t)
		}
	} else {
		q.order.release(p.gate)
	}
	q.mu.Unlock()
	if err == nil {
		if c.Gated != nil {
			c.Gated()
		}
		err = q.await(ctx, t, limit)
	}
	if err != nil {
		if p.capped {
			q.forget(p.client)
		}
		return Place{}, err
	}
	return t.place, nil
}

// mayWait returns the refusal of a request that may not wait. If the request may wait only in the place
// of another one, mayWait returns that one. The caller holds mu.
func (q *Queue) mayWait(t *ticket, sheddable bool, l config.Limits) (instead *ticket, err error) {
	left := time.Duration(l.QueueTimeout)
	if !t.deadline.IsZero() {
		left = min(left, t.deadline.Sub(t.arrived))
	}
	if sheddable {
		left = -1
	}
	if err := t.place.gate.refuses(left); err != nil {
		return nil, err
	}
	if sheddable {
		return nil, ErrQueueFull
	}
	return q.room(t, l)
}

// await waits until t is admitted or refused, for limit at most.
func (q *Queue) await(ctx context.Context, t *ticket, limit time.Duration) (err error) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-t.decided:
		return t.refusal
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-timer.C:
		err = ErrQueueTimeout
	}
	if q.abandon(t) {
		return err
	}
	return t.refusal // decided at the same moment: an admitted request runs
}

// abandon removes t from the queue. It returns false if t was already admitted or refused.
func (q *Queue) abandon(t *ticket) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	left := q.drop(t)
	q.rest()
	return left
}

// drop removes t, which gets no place, from the queue. It returns false if t does not wait. The
// caller holds mu and calls rest afterwards.
func (q *Queue) drop(t *ticket) bool {
	if !q.order.remove(t) {
		return false
	}
	t.disown()
	q.order.release(t.place.gate)
	q.countWaiting(t, -1)
	return true
}

// rest ends the memory of the order if no request waits. The caller holds mu.
func (q *Queue) rest() {
	if q.order.waiting == 0 {
		q.order.forget()
	}
}

// Waiting returns how many requests wait.
func (q *Queue) Waiting() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.order.waiting
}

// admit gives free places to waiting requests, of which there is one at least, whose models are not
// saturated. The caller holds mu.
func (q *Queue) admit() {
	q.lookAll()
	now := time.Now()
	for q.running < q.limit {
		t := q.order.next(q.limit, now)
		if t == nil {
			break
		}
		if q.order.keeps(t.place.class, q.limit) {
			t.place.evictable = nil
		}
		q.grant(t, now)
	}
	q.rest()
}

// grant gives t, which waits, its place. The caller holds mu.
func (q *Queue) grant(t *ticket, now time.Time) {
	t.disown()
	q.order.serve(&t.place)
	q.order.remove(t)
	t.place.class.since = now
	q.countWaiting(t, -1)
	q.run(&t.place)
	q.look(t.place.gate) // with the request that now comes to the engines
	close(t.decided)
}

// Reason returns the reason of pdproxy_shed_total for an error of Enter: "left" if the
// client did not wait.
func Reason(err error) string {
	var oe *openai.Error
	switch {
	case errors.As(err, &oe):
		return oe.Code.String()
	case errors.Is(err, downstream.ErrDraining):
		return openai.CodeDraining.String()
	}
	return "left"
}
