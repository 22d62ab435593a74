package proxy

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// admission lets at most limits.max_exchanges run, lets limits.queue wait in
// order of arrival, and caps what one client may have open. Safe for
// concurrent use; the limits may differ from call to call (reload).
type admission struct {
	mu      sync.Mutex
	running int              // guarded by mu
	waiting []*ticket        // guarded by mu; in order of arrival
	clients map[string]share // guarded by mu; only while a cap is set
	limit   int              // guarded by mu; the limit last seen
}

// share is what one client has open.
type share struct{ all, waiting int }

// ticket is one place in the queue. admitted is closed when its turn comes.
type ticket struct {
	admitted chan struct{}
	client   string
	capped   bool // the client's exchanges are counted
}

// Refusals. Their codes are the reasons of pdproxy_shed_total.
var (
	errQueueFull    = &openai.Error{Status: 429, Type: "rate_limit_error", Code: "queue_full", Message: "too many requests are running and waiting"}
	errQueueTimeout = &openai.Error{Status: 503, Type: "overloaded_error", Code: "queue_timeout", Message: "no place became free in time"}
	errClientCap    = &openai.Error{Status: 429, Type: "rate_limit_error", Code: "client_limit", Message: "this client has too many requests open"}
)

// enter waits for a place. On success the caller must call leave exactly once.
func (a *admission) enter(ctx context.Context, client string, l config.Limits) (leave func(), err error) {
	a.mu.Lock()
	a.limit = l.MaxExchanges
	a.admit() // the limit may have grown
	capped := l.PerClient > 0
	if capped {
		if a.clients == nil {
			a.clients = make(map[string]share)
		}
		has := a.clients[client]
		if has.all >= l.PerClient {
			a.mu.Unlock()
			return nil, errClientCap
		}
		has.all++ // what waits counts
		a.clients[client] = has
	}
	if a.running < l.MaxExchanges { // nobody waits then
		a.running++
		a.mu.Unlock()
	} else if err := a.wait(ctx, client, capped, l); err != nil { // unlocks
		if capped {
			a.forget(client)
		}
		return nil, err
	}
	return func() { a.leave(client, capped) }, nil
}

// forget takes away one exchange of a client whose exchanges are counted.
func (a *admission) forget(client string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	has := a.clients[client]
	if has.all--; has.all == 0 {
		delete(a.clients, client)
		return
	}
	a.clients[client] = has
}

// waits counts how many of a client wait, n more or fewer; mu is held.
func (a *admission) waits(t *ticket, n int) {
	if t.capped {
		has := a.clients[t.client]
		has.waiting += n
		a.clients[t.client] = has
	}
}

// wait queues the caller, who holds mu; mu is released when it returns. A nil
// error means that the place is already counted as running.
func (a *admission) wait(ctx context.Context, client string, capped bool, l config.Limits) error {
	if len(a.waiting) >= l.Queue {
		a.mu.Unlock()
		return errQueueFull
	}
	if capped && a.clients[client].waiting >= l.QueueShare() {
		a.mu.Unlock()
		return errClientCap
	}
	t := &ticket{admitted: make(chan struct{}), client: client, capped: capped}
	a.waiting = append(a.waiting, t)
	a.waits(t, 1)
	a.mu.Unlock()

	timer := time.NewTimer(time.Duration(l.QueueTimeout))
	defer timer.Stop()
	var err error
	select {
	case <-t.admitted:
		return nil
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-timer.C:
		err = errQueueTimeout
	}
	if a.abandon(t) {
		return err
	}
	return nil // its turn came at the same moment: take it
}

// abandon takes t out of the queue; false means that it was admitted already.
func (a *admission) abandon(t *ticket) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, w := range a.waiting {
		if w == t {
			a.waiting = append(a.waiting[:i], a.waiting[i+1:]...)
			a.waits(t, -1)
			return true
		}
	}
	return false
}

func (a *admission) leave(client string, capped bool) {
	if capped {
		a.forget(client)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.running--
	a.admit()
}

// admit gives free places to those who wait; mu is held.
func (a *admission) admit() {
	for a.running < a.limit && len(a.waiting) > 0 {
		t := a.waiting[0]
		a.waiting = a.waiting[1:]
		a.waits(t, -1)
		a.running++
		close(t.admitted)
	}
}

// shedReason is the label of a refusal; "left" when the client did not wait.
func shedReason(err error) string {
	var oe *openai.Error
	switch {
	case errors.As(err, &oe):
		return oe.Code
	case errors.Is(err, downstream.ErrDraining):
		return "draining"
	}
	return "left"
}
