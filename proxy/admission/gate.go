package admission

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Saturated reports whether the engines of a model are saturated, and by how long their present
// work delays a new request. further is the number of requests that have a place and have not
// come to an engine yet. It must not block and not call the queue.
type Saturated func(model string, further int) (delay time.Duration, saturated bool)

// gateEvery is the time between two looks at the gates of waiting requests. Each report of an
// engine, each ended request and each change of the registry has an effect after this time at
// the latest.
const gateEvery = 20 * time.Millisecond

// gate is closed while the engines of a model are saturated. All requests of one model have the
// same gate. It exists while a request of the model waits, or has a place and no engine yet.
type gate struct {
	model   string
	waiting int
	unsent  int // requests that have a place and no engine yet
	closed  bool
	delay   time.Duration // of a new request, if the gate is closed
}

// SaturatedError refuses a request whose engines are so saturated that the request would come
// too late. It matches the error for the client.
type SaturatedError struct {
	Delay time.Duration // by which the present work of the engines delays the request
}

var errSaturated = openai.NewError(openai.CodeSaturated, "the engines of the model have too much work for the request to begin in time")

// Error names the reason.
func (e *SaturatedError) Error() string { return errSaturated.Error() }

// Unwrap returns the error for the client.
func (e *SaturatedError) Unwrap() error { return errSaturated }

// RetrySeconds returns the delay in whole seconds, rounded up, at least 1.
func (e *SaturatedError) RetrySeconds() int64 {
	return max(1, int64((e.Delay+time.Second-1)/time.Second))
}

// refuses returns the refusal of a request whose wait ends after left. It returns nil if
// the request may come in time.
func (g *gate) refuses(left time.Duration) error {
	if g == nil || !g.closed || g.delay <= left {
		return nil
	}
	return &SaturatedError{Delay: g.delay}
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
	delay, closed := q.Saturated(g.model, g.unsent)
	g.delay = delay
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
	if q.watching || !q.order.held() {
		return
	}
	q.watching = true
	time.AfterFunc(gateEvery, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.watching = false
		q.admit()
		q.watch()
	})
}

// held reports whether a request waits at a closed gate.
func (f *fair) held() bool {
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
