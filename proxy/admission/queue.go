package admission

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Queue lets limits.max_exchanges requests run, lets limits.queue requests wait in order
// of arrival, and limits the open requests of one client. The limits may differ from call
// to call, because a reload may change them. The zero value is empty. Safe for concurrent
// use.
type Queue struct {
	mu      sync.Mutex
	running int              // guarded by mu
	waiting []*ticket        // guarded by mu; in order of arrival
	clients map[string]share // guarded by mu; only clients with counted requests
	limit   int              // guarded by mu; MaxExchanges of the last call
}

// share counts the open requests of one client.
type share struct{ all, waiting int }

// ticket is one place in the queue. admitted is closed when the request may run.
type ticket struct {
	admitted chan struct{}
	client   string
	capped   bool // the client's requests are counted
}

// Refusals of Enter. Their codes are the reasons of pdproxy_shed_total.
var (
	ErrQueueFull    = openai.NewError(openai.CodeQueueFull, "too many requests are running and waiting")
	ErrQueueTimeout = openai.NewError(openai.CodeQueueTimeout, "no place became free in time")
	ErrClientLimit  = openai.NewError(openai.CodeClientLimit, "this client has too many requests open")
)

// Enter waits until the client's request may run. On success the caller must call leave
// exactly once, when the request ends. The error is one of the refusals, or the cause of
// ctx.
func (q *Queue) Enter(ctx context.Context, client string, l config.Limits) (leave func(), err error) {
	q.mu.Lock()
	q.limit = l.MaxExchanges
	q.admit() // the limit may be higher than before
	capped := l.PerClient > 0
	if capped {
		if q.clients == nil {
			q.clients = make(map[string]share)
		}
		has := q.clients[client]
		if has.all >= l.PerClient {
			q.mu.Unlock()
			return nil, ErrClientLimit
		}
		has.all++ // waiting requests count, too
		q.clients[client] = has
	}
	if q.running < l.MaxExchanges { // then no request waits
		q.running++
		q.mu.Unlock()
	} else if err := q.wait(ctx, client, capped, l); err != nil { // unlocks
		if capped {
			q.forget(client)
		}
		return nil, err
	}
	return func() { q.leave(client, capped) }, nil
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
	if t.capped {
		has := q.clients[t.client]
		has.waiting += n
		q.clients[t.client] = has
	}
}

// wait queues the caller, who holds mu. mu is released when wait returns. If the error is
// nil the request is already counted as running.
func (q *Queue) wait(ctx context.Context, client string, capped bool, l config.Limits) error {
	if len(q.waiting) >= l.Queue {
		q.mu.Unlock()
		return ErrQueueFull
	}
	if capped && q.clients[client].waiting >= l.QueueShare() {
		q.mu.Unlock()
		return ErrClientLimit
	}
	t := &ticket{admitted: make(chan struct{}), client: client, capped: capped}
	q.waiting = append(q.waiting, t)
	q.countWaiting(t, 1)
	q.mu.Unlock()

	timer := time.NewTimer(time.Duration(l.QueueTimeout))
	defer timer.Stop()
	var err error
	select {
	case <-t.admitted:
		return nil
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-timer.C:
		err = ErrQueueTimeout
	}
	if q.abandon(t) {
		return err
	}
	return nil // admitted at the same moment: the request runs
}

// abandon removes t from the queue. It returns false if t was already admitted.
func (q *Queue) abandon(t *ticket) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i, w := range q.waiting {
		if w == t {
			q.waiting = append(q.waiting[:i], q.waiting[i+1:]...)
			q.countWaiting(t, -1)
			return true
		}
	}
	return false
}

func (q *Queue) leave(client string, capped bool) {
	if capped {
		q.forget(client)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.running--
	q.admit()
}

// admit gives free places to waiting requests. The caller holds mu.
func (q *Queue) admit() {
	for q.running < q.limit && len(q.waiting) > 0 {
		t := q.waiting[0]
		q.waiting = q.waiting[1:]
		q.countWaiting(t, -1)
		q.running++
		close(t.admitted)
	}
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
