package upstream

import (
	"container/list"
	"sync"
	"time"
)

// pool has the calls to one engine and counts its connections. It keeps the idle ones,
// newest last. A call takes the newest idle connection, so that the other ones reach
// their maximum age and are closed. At the cap, calls wait in the order of their arrival.
// A slot is a connection, or the right to open one.
type pool struct {
	maxConns, maxIdle int
	idleTimeout       time.Duration
	base              time.Time // origin of the times lastRead

	mu       sync.Mutex
	calls    []*call     // guarded by mu; the calls in progress, in any order
	lastRead int64       // the latest lastRead of calls that have ended; guarded by mu
	open     int         // guarded by mu; slots taken
	idle     []*conn     // guarded by mu
	waiters  list.List   // guarded by mu; chan *conn; not empty only if idle is empty
	sweeper  *time.Timer // guarded by mu
	armed    bool        // guarded by mu; sweeper will fire
}

// take begins the call c, and returns an idle connection, or nil and a slot to open one.
// At the cap it waits until the call ends, at most until the call's sendBy, and at most
// for limit if that is not 0. An error ends the call.
func (p *pool) take(c *call, limit time.Duration) (*conn, error) {
	p.mu.Lock()
	p.calls = append(p.calls, c)
	c.place = len(p.calls)
	cn, old := p.pop()
	if cn == nil {
		if p.maxConns > 0 && p.open >= p.maxConns {
			place := p.waiters.PushBack(make(chan *conn, 1)) // receives a connection, or nil for a slot
			p.mu.Unlock()
			return p.wait(c, place, limit)
		}
		p.open++
	}
	p.mu.Unlock()
	if old != nil {
		closeAll(old)
	}
	return cn, nil
}

// pop removes and returns the newest idle connection. If that one is too old, all are:
// pop then returns all as old, and the caller closes them. mu is held.
func (p *pool) pop() (cn *conn, old []*conn) {
	n := len(p.idle) - 1
	if n < 0 {
		return nil, nil
	}
	if time.Since(p.idle[n].idleSince) >= p.idleTimeout {
		return nil, p.shed(n + 1)
	}
	cn = p.idle[n]
	p.idle[n] = nil
	p.idle = p.idle[:n]
	return cn, nil
}

// wait returns when the call at place gets a connection or a slot, or when the call gives up.
func (p *pool) wait(c *call, place *list.Element, limit time.Duration) (*conn, error) {
	ctx, done := c.interruptible()
	defer done()
	if !c.sendBy.IsZero() {
		if left := max(1, time.Until(c.sendBy)); limit == 0 || left < limit {
			limit = left
		}
	}
	var late <-chan time.Time
	if limit > 0 {
		timer := time.NewTimer(limit)
		defer timer.Stop()
		late = timer.C
	}
	select {
	case cn := <-place.Value.(chan *conn):
		return cn, nil
	case <-ctx.Done():
		p.leave(c, place)
		return nil, c.waitError()
	case <-late:
		p.leave(c, place)
		return nil, errTimeout
	}
}

// leave ends a call in the queue, and returns a connection or slot that its place has
// received in the meantime.
func (p *pool) leave(c *call, place *list.Element) {
	p.mu.Lock()
	p.unlist(c)
	ready := p.waiters.Remove(place).(chan *conn)
	p.mu.Unlock()
	select {
	case cn := <-ready:
		p.give(c, cn)
	default:
	}
}

// swap exchanges a slot for an idle connection if there is one. Otherwise it returns
// nil and the caller keeps the slot.
func (p *pool) swap() *conn {
	p.mu.Lock()
	cn, old := p.pop()
	if cn != nil {
		p.open--
	}
	p.mu.Unlock()
	closeAll(old)
	return cn
}

// give ends the call c and returns its slot: its connection, which can carry another
// request, or nil if the connection is closed or was never opened.
func (p *pool) give(c *call, cn *conn) {
	p.mu.Lock()
	p.unlist(c)
	switch {
	case p.waiters.Len() > 0:
		// The call that has waited longest gets the slot before mu is released, so that leave finds it.
		p.waiters.Remove(p.waiters.Front()).(chan *conn) <- cn
		cn = nil
	case cn == nil || len(p.idle) >= p.maxIdle:
		p.open--
	default:
		cn.idleSince = time.Now()
		p.idle = append(p.idle, cn)
		if !p.armed {
			p.arm(p.idleTimeout)
		}
		cn = nil
	}
	p.mu.Unlock()
	if cn != nil { // no room for it
		cn.Close()
	}
}

// unlist removes a call from calls. For a call that is not there it does nothing. mu is held.
func (p *pool) unlist(c *call) {
	if c.place == 0 {
		return
	}
	end := len(p.calls) - 1
	last := p.calls[end]
	p.calls[c.place-1], last.place = last, c.place
	p.calls[end], p.calls = nil, p.calls[:end]
	c.place = 0
	p.lastRead = max(p.lastRead, c.lastRead.Load())
}

// add begins a call that has a slot already.
func (p *pool) add(c *call) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls = append(p.calls, c)
	c.place = len(p.calls)
}

// remove ends a call whose slot stays taken.
func (p *pool) remove(c *call) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unlist(c)
}

// arm starts the sweeper. mu is held.
func (p *pool) arm(d time.Duration) {
	p.armed = true
	if p.sweeper == nil {
		p.sweeper = time.AfterFunc(d, p.sweep)
		return
	}
	p.sweeper.Reset(d)
}

// sweep closes the connections that have been idle for too long. The pool has one
// timer, which is stopped while no connection is idle.
func (p *pool) sweep() {
	p.mu.Lock()
	now, n := time.Now(), 0
	for n < len(p.idle) && now.Sub(p.idle[n].idleSince) >= p.idleTimeout {
		n++
	}
	old := p.shed(n)
	p.armed = false
	if len(p.idle) > 0 {
		p.arm(p.idleTimeout - now.Sub(p.idle[0].idleSince))
	}
	p.mu.Unlock()
	closeAll(old)
}

func (p *pool) closeIdle() {
	p.mu.Lock()
	old := p.shed(len(p.idle))
	if p.armed && p.sweeper.Stop() {
		p.armed = false
	}
	p.mu.Unlock()
	closeAll(old)
}

// shed removes the n oldest idle connections from the pool. mu is held.
func (p *pool) shed(n int) []*conn {
	old := append([]*conn(nil), p.idle[:n]...)
	m := copy(p.idle, p.idle[n:])
	clear(p.idle[m:])
	p.idle = p.idle[:m]
	p.open -= n
	return old
}

func closeAll(conns []*conn) {
	for _, c := range conns {
		c.Close()
	}
}

func (p *pool) stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return Stats{Open: p.open, Idle: len(p.idle), Waiting: p.waiters.Len()}
}
