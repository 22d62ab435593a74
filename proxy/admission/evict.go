package admission

import (
	"cmp"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Eviction ends a running request of a low class, so that a waiting request of a higher class gets
// its place. Each waiting request asks the evict policy at most once, when it begins to wait, and ends
// at most one request. The freed place goes to a waiting request of a class above that of the ended
// one, in the order of the shares; a saturated gate does not hold it back, because the engines have
// lost a request of the same model. A request that got its place by the share or the promotion of its
// class while a higher class waited cannot be ended: the shares of the classes hold.

// Evict asks the evict policy. by is its name. If ok is false, there is no decision.
type Evict func(f *abi.EvictFacts) (row int32, by string, ok bool)

// Evictable is a running request that Evict may end.
type Evictable struct {
	End func(*EvictedError) // ends the request, which then calls Leave; called without a lock
	// Progress fills in the phase, the engines and the sent events. It must not block.
	Progress func(r *abi.Evictable)

	// All of the following is guarded by mu of the queue.
	class          *class
	model          string // of the claim
	tenant         uint32
	tokens         int64
	began          time.Time // when it got its place
	listed         bool      // in the list of its class
	older, younger *Evictable
	evicted        bool    // it ends
	heir           *ticket // the waiting request for which it ends; nil: that one has left the queue
}

// EvictedError is the cause with which a request ends for one of a higher class. It matches the error
// for the client.
type EvictedError struct {
	Saturated bool   // the engines of the model were saturated; otherwise all places were taken
	Policy    string // that decided
	Class     string // of the request that ends
	For       string // class of the waiting request
	delay     time.Duration
}

var errEvicted = openai.NewError(openai.CodeEvicted, "the proxy ended the request, because a request of a higher class needs its place")

// Error names the reason.
func (e *EvictedError) Error() string { return errEvicted.Error() }

// Unwrap returns the error for the client.
func (e *EvictedError) Unwrap() error { return errEvicted }

// RetrySeconds returns the known delay of a new request in whole seconds, rounded up, at least 1.
func (e *EvictedError) RetrySeconds() int64 { return wholeSeconds(e.delay) }

// Reason is the label of pdproxy_evictions_total.
func (e *EvictedError) Reason() string {
	if e.Saturated {
		return "saturated"
	}
	return "max_exchanges"
}

// Sheddable reports whether requests of a class of that priority may be ended.
func Sheddable(priority int) bool { return priority < 0 }

const (
	// evictTime is the time that an eviction takes at most. A request that leaves the queue earlier
	// ends none.
	evictTime = gateEvery
	// maxLooked bounds the running requests at which one question looks.
	maxLooked = 8 * abi.MaxEvictable
)

// list adds the running request of p, which has just got its place, to those that may be ended. The
// caller holds mu.
func (p *Place) list() {
	r := p.evictable
	r.class, r.began, r.listed = p.class, time.Now(), true
	if r.older = p.class.youngest; r.older != nil {
		r.older.younger = r
	}
	p.class.youngest = r
}

// unlist is the inverse of list. The caller holds mu.
func (r *Evictable) unlist() {
	if r.younger != nil {
		r.younger.older = r.older
	} else {
		r.class.youngest = r.older
	}
	if r.older != nil {
		r.older.younger = r.younger
	}
	r.listed, r.older, r.younger = false, nil, nil
}

// keeps reports whether a request of class c that gets its place now keeps it: it has got the place
// before a waiting request of a higher class that could run.
func (f *fair) keeps(c *class, places int) bool {
	return slices.ContainsFunc(f.classes, func(o *class) bool {
		return o.Priority > c.Priority && len(o.active) > 0 && o.mayRun(places)
	})
}

// wantEviction lets the evict policy decide whether a running request ends for t, which has begun to
// wait. The caller holds mu.
func (q *Queue) wantEviction(t *ticket) {
	if !q.order.hasBelow(t.place.class.Priority) {
		return
	}
	if q.wanting = append(q.wanting, t); !q.asking {
		q.asking = true
		go q.ask() // ends when no request wants an eviction
	}
}

// hasBelow reports whether a request of a lower class could be ended.
func (f *fair) hasBelow(priority int) bool {
	return slices.ContainsFunc(f.classes, func(c *class) bool {
		return c.youngest != nil && c.Priority < priority && Sheddable(c.Priority)
	})
}

// ask asks the evict policy for one waiting request after the other. One goroutine asks at a time, so
// that no two requests choose the same one.
func (q *Queue) ask() {
	var f abi.EvictFacts
	var rows []*Evictable
	for {
		q.mu.Lock()
		if len(q.wanting) == 0 {
			q.asking, q.wanting = false, nil
			q.mu.Unlock()
			return
		}
		t := q.wanting[0]
		rows = q.evictable(t, &f, rows[:0])
		if len(rows) == 0 {
			q.wanting = q.wanting[1:]
		}
		q.mu.Unlock()
		if len(rows) == 0 {
			continue
		}
		row, by, ok := q.Evict(&f)
		q.evict(t, rows, row, by, ok)
	}
}

// evict ends the request of that row for t. If the request has left meanwhile, ask asks again.
func (q *Queue) evict(t *ticket, rows []*Evictable, row int32, by string, ok bool) {
	q.mu.Lock()
	if ok = ok && row >= 0; ok && !rows[row].listed {
		q.mu.Unlock()
		return
	}
	q.wanting = q.wanting[1:]
	if !ok || !t.waits {
		q.mu.Unlock()
		return
	}
	r := rows[row]
	r.unlist()
	r.evicted = true
	q.ending = append(q.ending, r)
	r.adopt(t)
	e := &EvictedError{Saturated: t.gated(), Policy: by, Class: r.class.Name, For: t.place.class.Name}
	if e.Saturated {
		e.delay = t.place.gate.delay
	}
	q.mu.Unlock()
	r.End(e)
}

// gated reports whether a closed gate holds t back.
func (t *ticket) gated() bool { return t.place.gate != nil && t.place.gate.closed }

// adopt makes t the request for which r ends.
func (r *Evictable) adopt(t *ticket) {
	r.heir, t.victim = t, r
	t.place.class.heirs++
}

// disown notes that no request ends for t any more. It returns the one that did, nil for none.
func (t *ticket) disown() *Evictable {
	r := t.victim
	if r != nil {
		r.heir, t.victim = nil, nil
		t.place.class.heirs--
	}
	return r
}

// frees reports whether the end of r gives t a place.
func (r *Evictable) frees(t *ticket) bool { return !t.gated() || r.model == t.place.gate.model }

// evictable writes the facts for t into f, and returns the requests of the rows. There is none if t
// would gain nothing. The caller holds mu.
func (q *Queue) evictable(t *ticket, f *abi.EvictFacts, rows []*Evictable) []*Evictable {
	now, c := time.Now(), t.place.class
	left := t.until.Sub(now)
	*f = abi.EvictFacts{Running: f.Running[:0], Saturated: t.gated(), Priority: int32(c.Priority), Class: abi.LabelID(c.Name), Tenant: abi.LabelID(t.place.flow.name), PromptTokens: t.prompt}
	if !t.deadline.IsZero() {
		left = min(left, t.deadline.Sub(now))
		f.Remaining = t.deadline.Sub(now).Milliseconds()
	}
	if !t.waits || left < evictTime || c.running+c.heirs >= c.Places(q.limit) {
		return rows
	}
	if i := slices.IndexFunc(q.ending, func(r *Evictable) bool { return r.heir == nil && r.class.Priority < c.Priority && r.frees(t) }); i >= 0 {
		q.ending[i].adopt(t) // it ends already, for a request that needs it no more
		return rows
	}
	below := q.order.below(c.Priority)
	looked := 0
	for _, c := range below {
		for r := c.youngest; r != nil && len(rows) < abi.MaxEvictable && looked < maxLooked; r = r.older {
			if looked++; !r.frees(t) {
				continue
			}
			row := abi.Evictable{Priority: int32(c.Priority), Class: abi.LabelID(c.Name), Tenant: r.tenant, AgeMicros: now.Sub(r.began).Microseconds(), PromptTokens: r.tokens}
			r.Progress(&row)
			f.Running, rows = append(f.Running, row), append(rows, r)
		}
	}
	return rows
}

// below returns the classes below that priority whose requests may be ended, the lowest first.
func (f *fair) below(priority int) (list []*class) {
	for _, c := range f.classes {
		if c.youngest != nil && c.Priority < priority && Sheddable(c.Priority) {
			list = append(list, c)
		}
	}
	slices.SortStableFunc(list, func(a, b *class) int { return cmp.Compare(a.Priority, b.Priority) })
	return list
}

// left notes that the request has given its place back. If it was evicted, its place goes to a waiting
// request of a higher class. The caller holds mu.
func (q *Queue) left(r *Evictable) {
	if r.listed {
		r.unlist()
	}
	if !r.evicted {
		return
	}
	q.ending = slices.DeleteFunc(q.ending, func(o *Evictable) bool { return o == r })
	waits := r.heir
	if waits != nil {
		waits.disown()
	}
	if q.running >= q.limit { // a reload has lowered it
		return
	}
	t := q.order.heir(r, q.limit)
	if t == nil {
		return
	}
	other := t.disown()
	q.order.catchUp(t)
	q.grant(t, time.Now())
	if other != nil && waits != nil && waits != t { // t has taken the place of waits
		other.adopt(waits)
	}
}

// heir returns the waiting request that gets the place of r: of the classes above that of r, in the
// order of the shares. A closed gate counts as open if r was of its model. nil: there is none.
func (f *fair) heir(r *Evictable, places int) (next *ticket) {
	var best *class
	for _, c := range f.classes {
		if c.Priority <= r.class.Priority || c.waiting == 0 || !c.mayRun(places) {
			continue
		}
		t := c.first(r)
		if t != nil && (best == nil || max(c.served, f.now) < max(best.served, f.now)) {
			best, next = c, t
		}
	}
	return next
}

// first returns the request of the class that gets the place of r, nil if there is none.
func (c *class) first(r *Evictable) (next *ticket) {
	served := 0.0
	for _, t := range c.flows {
		for n := range t.lines {
			w := t.lines[n].waiting[0]
			if !r.frees(w) {
				continue
			}
			mine := max(t.served, c.now)
			if next == nil || mine < served || mine == served && w.number < next.number {
				next, served = w, mine
			}
		}
	}
	return next
}

// catchUp takes the credit from the class and the tenant of t, which a closed gate has kept out of the
// order.
func (f *fair) catchUp(t *ticket) {
	c, of := t.place.class, t.place.flow
	if len(c.active) == 0 {
		c.served = max(c.served, f.now)
	}
	if of.index < 0 {
		of.served = max(of.served, c.now)
	}
}

// wholeSeconds returns d in whole seconds, rounded up, at least 1.
func wholeSeconds(d time.Duration) int64 {
	return max(1, int64((d+time.Second-1)/time.Second))
}
