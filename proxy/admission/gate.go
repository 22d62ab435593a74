package admission

import (
	"cmp"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Saturated reports whether the engines of a model are saturated. If they are, delay is the time
// that the present work of the engines takes before a new request begins. each is the time that one
// further request before the new one adds; 0: unknown. further is the number of requests that have a
// place and have not come to an engine yet. Saturated must not block and must not call the queue.
type Saturated func(model string, further int) (delay, each time.Duration, saturated bool)

// gateEvery is the time between two looks at the gates of waiting requests. Each report of an
// engine, each ended request and each change of the registry has an effect after this time at
// the latest.
const gateEvery = 20 * time.Millisecond

// lateEvery is the number of waiting requests for which each look takes the time to predict
// which of them come too late. With n times as many, every n-th look does.
const lateEvery = 1000

// gate is closed while the engines of a model are saturated. All requests of one model have the
// same gate. It exists while a request of the model waits, or has a place and no engine yet.
type gate struct {
	model   string
	waiting int
	unsent  int // requests that have a place and no engine yet
	closed  bool

	delay, each time.Duration // as in Saturated; valid if the gate is closed
}

// SaturatedError refuses a request whose engines are so saturated that the request would come
// too late. It matches the error for the client.
type SaturatedError struct {
	Delay time.Duration // by which the work of the engines, and the requests that come first, delay the request
}

var errSaturated = openai.NewError(openai.CodeSaturated, "the engines of the model have too much work for the request to begin in time")

// Error names the reason.
func (e *SaturatedError) Error() string { return errSaturated.Error() }

// Unwrap returns the error for the client.
func (e *SaturatedError) Unwrap() error { return errSaturated }

// RetrySeconds returns the delay in whole seconds, rounded up, at least 1.
func (e *SaturatedError) RetrySeconds() int64 {
	return wholeSeconds(e.Delay)
}

// after returns the delay of a request. before is the number of requests behind the closed gate that
// get their places first.
func (g *gate) after(before int) time.Duration {
	return g.delay + time.Duration(g.unsent+before)*g.each
}

// refuses returns the refusal of a new request that may be delayed for left. It returns nil if
// the request may come in time. The requests behind the gate do not count: refuseLate counts
// them at the next look.
func (g *gate) refuses(left time.Duration) error {
	if g == nil || !g.closed || g.after(0) <= left {
		return nil
	}
	return &SaturatedError{Delay: g.after(0)}
}

// late reports whether t comes too late: its first token after its deadline, or its place after
// queue_timeout. before is as in after. The engines free places long before they have done their
// present work. So that work counts for the first token, and not for the place.
func (g *gate) late(t *ticket, before int, now time.Time) bool {
	if !t.deadline.IsZero() && g.after(before) > max(0, t.deadline.Sub(now)) {
		return true
	}
	return time.Duration(before)*g.each > max(0, t.until.Sub(now))
}

// refuseLate refuses the waiting requests that would come too late. The caller holds mu.
func (q *Queue) refuseLate(now time.Time) {
	for _, g := range q.order.gates {
		if !g.closed {
			continue
		}
		for _, c := range q.order.classes {
			before := 0
			for _, turn := range c.behind(g) {
				t := turn.ticket
				if !g.late(t, before, now) {
					before++
					continue
				}
				t.refusal = &SaturatedError{Delay: g.after(before)}
				q.refuse(t)
			}
		}
	}
	q.rest()
}

// turn is one waiting request in the order of a class.
type turn struct {
	served float64 // tokens per weight that the tenant has received then
	ticket *ticket
}

// behind returns the waiting requests of the class behind g, in the order in which they get their
// places if nothing changes. The requests of other classes do not count as coming first: a
// promotion may put this class before them at any time.
func (c *class) behind(g *gate) (turns []turn) {
	for _, t := range c.flows {
		l := t.line(g)
		if l == nil {
			continue
		}
		served := max(t.served, c.now)
		for _, w := range l.waiting {
			turns = append(turns, turn{served, w})
			served += float64(w.place.booked) / t.weight
		}
	}
	slices.SortFunc(turns, func(a, b turn) int {
		return cmp.Or(cmp.Compare(a.served, b.served), cmp.Compare(a.ticket.number, b.ticket.number))
	})
	return turns
}

// gate returns the gate of a model, nil for "".
func (f *fair) gate(model string) *gate {
	if model == "" {
		return nil
	}
	g := f.gates[model]
	if g == nil {
		if f.gates == nil {
			f.gates = make(map[string]*gate)
		}
		g = &gate{model: model}
		f.gates[model] = g
	}
	return g
}

// release forgets a gate that no request needs.
func (f *fair) release(g *gate) {
	if g != nil && g.waiting == 0 && g.unsent == 0 {
		delete(f.gates, g.model)
	}
}

// look asks whether the engines of the gate's model are saturated. The caller holds mu.
func (q *Queue) look(g *gate) {
	if g == nil {
		return
	}
	delay, each, closed := q.Saturated(g.model, g.unsent)
	g.delay, g.each = delay, each
	if closed == g.closed {
		return
	}
	g.closed = closed
	if g.waiting > 0 {
		q.order.turned(g)
		q.watch()
	}
}

// lookAll looks at the gates of all waiting requests. The caller holds mu.
func (q *Queue) lookAll() {
	for _, g := range q.order.gates {
		if g.waiting > 0 {
			q.look(g)
		}
	}
}

// watch looks at the gates from time to time while a request waits at a closed one. The caller
// holds mu.
func (q *Queue) watch() {
	if q.watching || !q.order.gated() {
		return
	}
	q.watching = true
	time.AfterFunc(gateEvery, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.watching = false
		if q.order.waiting > 0 {
			q.admit()
		}
		if q.looks++; q.looks%(1+q.order.waiting/lateEvery) == 0 {
			q.refuseLate(time.Now())
		}
		q.watch()
	})
}

// gated reports whether a request waits at a closed gate.
func (f *fair) gated() bool {
	for _, g := range f.gates {
		if g.closed && g.waiting > 0 {
			return true
		}
	}
	return false
}

// turned sorts the tenants with waiting requests behind g, which has opened or closed.
func (f *fair) turned(g *gate) {
	for _, c := range f.classes {
		for _, t := range c.flows {
			if t.line(g) != nil {
				f.sort(c, t)
			}
		}
	}
}

// Sent reports that the request has come to an engine: its load counts there from now on. Later
// calls do nothing.
func (p *Place) Sent() {
	if p.gate == nil {
		return
	}
	p.queue.mu.Lock()
	defer p.queue.mu.Unlock()
	p.sent()
}

// sent does Sent. The caller holds mu.
func (p *Place) sent() {
	if g := p.gate; g != nil {
		p.gate = nil
		g.unsent--
		p.queue.order.release(g)
	}
}
