package admission

import (
	"cmp"
	"container/heap"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// fair orders the waiting requests: by start-time fair queuing over the priority classes,
// and within a class over the tenants. A class or tenant that has received fewer tokens for
// its weight comes first. A class or tenant that had nothing to send gets no credit for that
// time, and none for the time in which the engines of all its models were saturated. The order
// has a memory only while requests wait. The zero value has no request. The
// caller holds the lock of the queue.
type fair struct {
	classes []*class
	gates   map[string]*gate // by model; only those that a request needs
	waiting int
	now     float64 // tokens per weight of the class that was served last
	memory  uint64  // how often the order has forgotten all
}

// class is one priority class.
type class struct {
	config.PriorityClass
	running int
	waiting int
	since   time.Time // when the class last got a place, or began to wait for one
	served  float64   // tokens per weight
	flows   map[string]*flow
	busy    int      // tenants with waiting requests
	active  flowHeap // those with a waiting request whose gate is open
	now     float64  // tokens per weight of the tenant that was served last

	youngest *Evictable // that got its place last, of the requests that may be ended; nil: none
	heirs    int        // waiting requests for which a running one ends
}

// flow is the requests of one tenant within a class.
type flow struct {
	name   string
	weight float64
	served float64 // tokens per weight
	booked int64   // tokens of the waiting requests
	lines  []line  // of waiting requests; one for each gate
	head   *ticket // the oldest one whose gate was open at the last sort; nil: none
	index  int     // in the heap of the class; -1: head is nil
}

// line is the waiting requests of one tenant behind one gate.
type line struct {
	gate    *gate     // nil: always open
	waiting []*ticket // oldest first; never empty
}

// line returns the line behind g, nil if no request waits there.
func (t *flow) line(g *gate) *line {
	for n := range t.lines {
		if t.lines[n].gate == g {
			return &t.lines[n]
		}
	}
	return nil
}

// first returns the oldest waiting request whose gate is open, nil if there is none.
func (t *flow) first() *ticket {
	var oldest *ticket
	for n := range t.lines {
		l := &t.lines[n]
		if (l.gate == nil || !l.gate.closed) && (oldest == nil || l.waiting[0].number < oldest.number) {
			oldest = l.waiting[0]
		}
	}
	return oldest
}

// maxIdle bounds the tenants of a class without waiting requests that the order remembers.
const maxIdle = 1024

// class returns the class of c, with the values of c.
func (f *fair) class(c config.PriorityClass) *class {
	for _, known := range f.classes {
		if known.Name == c.Name {
			known.PriorityClass = c // a reload may have changed it
			return known
		}
	}
	made := &class{PriorityClass: c, flows: make(map[string]*flow)}
	f.classes = append(f.classes, made)
	return made
}

// mayRun reports whether the class has less than its share of the places.
func (c *class) mayRun(places int) bool { return c.running < c.Places(places) }

// flow returns the flow of the tenant of that name.
func (c *class) flow(name string, weight float64) *flow {
	t := c.flows[name]
	if t == nil {
		if len(c.flows) >= maxIdle+c.busy {
			c.forgetIdle()
		}
		t = &flow{name: name, index: -1, served: c.now}
		c.flows[name] = t
	}
	t.weight = weight
	return t
}

// forgetIdle forgets the tenants without waiting requests.
func (c *class) forgetIdle() {
	for name, t := range c.flows {
		if len(t.lines) == 0 {
			delete(c.flows, name)
		}
	}
}

// add lets t wait.
func (f *fair) add(t *ticket) {
	c, of := t.place.class, t.place.flow
	if c.waiting == 0 {
		c.since = t.arrived
	}
	if len(of.lines) == 0 {
		c.busy++
	}
	if l := of.line(t.place.gate); l != nil {
		l.waiting = append(l.waiting, t)
	} else {
		of.lines = append(of.lines, line{gate: t.place.gate, waiting: []*ticket{t}})
	}
	f.sort(c, of)
	if t.place.gate != nil {
		t.place.gate.waiting++
	}
	t.waits = true
	c.waiting++
	of.booked += t.place.booked
	f.waiting++
}

// remove takes t out of the order. It returns false if t does not wait.
func (f *fair) remove(t *ticket) bool {
	if !t.waits {
		return false
	}
	c, of := t.place.class, t.place.flow
	t.waits = false
	c.waiting--
	of.booked -= t.place.booked
	l := of.line(t.place.gate)
	if l.waiting = slices.DeleteFunc(l.waiting, func(w *ticket) bool { return w == t }); len(l.waiting) == 0 {
		of.lines = slices.DeleteFunc(of.lines, func(l line) bool { return len(l.waiting) == 0 })
	}
	if len(of.lines) == 0 {
		c.busy--
	}
	f.sort(c, of)
	if g := t.place.gate; g != nil {
		g.waiting-- // the caller releases the gate
	}
	f.waiting--
	return true
}

// sort puts the tenant in its place among those whose request may run, or takes the tenant out.
// A tenant or class that may run again has no credit for the time before.
func (f *fair) sort(c *class, t *flow) {
	switch first := t.first(); {
	case first != nil && t.index >= 0:
		t.head = first
		heap.Fix(&c.active, t.index)
	case first != nil:
		t.head = first
		if len(c.active) == 0 {
			c.served = max(c.served, f.now)
		}
		t.served = max(t.served, c.now)
		heap.Push(&c.active, t)
	case t.index >= 0:
		heap.Remove(&c.active, t.index)
		t.head = nil
	}
}

// next returns the request that gets the next place, nil if none may run. The request still
// waits. A class that got no place for its PromoteAfter comes first. Within the class, the
// tenants keep their order: a promotion by the age of requests would give all places to the
// tenant whose flood of requests is old.
func (f *fair) next(places int, now time.Time) *ticket {
	var best, promoted *class
	for _, c := range f.classes {
		if len(c.active) == 0 || !c.mayRun(places) {
			continue
		}
		if c.starves(now) && (promoted == nil || c.since.Before(promoted.since)) {
			promoted = c
		}
		if best == nil || c.served < best.served {
			best = c
		}
	}
	if promoted != nil {
		best = promoted
	}
	if best == nil {
		return nil
	}
	return best.active[0].head
}

// starves reports whether the class waits for its next place longer than it should.
func (c *class) starves(now time.Time) bool {
	after := time.Duration(c.PromoteAfter)
	return after > 0 && now.Sub(c.since) >= after
}

// serve charges p with the tokens that its request is expected to use. It does nothing while
// no request waits.
func (f *fair) serve(p *Place) {
	if f.waiting == 0 {
		return
	}
	p.charged, p.memory = true, f.memory
	f.now, p.class.now = max(f.now, p.class.served), max(p.class.now, p.flow.served)
	p.charge(p.booked)
}

// correct replaces the expected tokens of p by the used ones. It does nothing after the order has
// forgotten the expected tokens: the difference would be a credit or a debt.
func (f *fair) correct(p *Place, used int64) {
	if p.charged && p.memory == f.memory {
		p.charge(used - p.booked)
	}
}

// charge adds tokens to those that the class and the tenant have received.
func (p *Place) charge(tokens int64) {
	p.class.served += float64(tokens) / p.class.Weight
	p.flow.served += float64(tokens) / p.flow.weight
	if p.flow.index >= 0 {
		heap.Fix(&p.class.active, p.flow.index)
	}
}

// forget ends the memory when no request waits any more: a class or tenant that used an idle
// proxy owes nothing later.
func (f *fair) forget() {
	f.now = 0
	f.memory++
	for _, c := range f.classes {
		c.served, c.now = 0, 0
		clear(c.flows)
	}
	f.classes = slices.DeleteFunc(f.classes, func(c *class) bool { return c.running == 0 })
}

// flowHeap is a heap of those with a waiting request that may run. The first one comes next.
type flowHeap []*flow

// Len implements heap.Interface.
func (h flowHeap) Len() int { return len(h) }

// Less implements heap.Interface. Of tenants that have received the same, the one whose
// request waits longer comes first.
func (h flowHeap) Less(i, j int) bool {
	if c := cmp.Compare(h[i].served, h[j].served); c != 0 {
		return c < 0
	}
	return h[i].head.number < h[j].head.number
}

// Swap implements heap.Interface.
func (h flowHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push implements heap.Interface.
func (h *flowHeap) Push(x any) {
	t := x.(*flow)
	t.index = len(*h)
	*h = append(*h, t)
}

// Pop implements heap.Interface.
func (h *flowHeap) Pop() any {
	last := len(*h) - 1
	t := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	t.index = -1
	return t
}
