package upstream

import (
	"container/list"
	"sync"
	"time"
)

// pool counts the connections to one engine and keeps the idle ones, newest last. A call
// takes the newest idle connection, so that the other ones reach their maximum age and
// are closed. At the cap, calls wait in the order of their arrival. A slot is a
// connection, or the right to open one.
type pool struct {
	maxConns, maxIdle int
	idleTimeout       time.Duration

	mu      sync.Mutex
	open    int         // guarded by mu; slots taken
	idle    []*conn     // guarded by mu
	waiters list.List   // guarded by mu; chan *conn; not empty only if idle is empty
	sweeper *time.Timer // guarded by mu
	armed   bool        // guarded by mu; sweeper will fire
}

// take returns an idle connection, or nil and a slot to open one. At the cap it waits
// until the call ends, or at most for limit if that is not 0.
func (p *pool) take(call *call, limit time.Duration) (*conn, error) {
	p.mu.Lock()
	c, old := p.pop()
	if c != nil || p.maxConns == 0 || p.open < p.maxConns {
		if c == nil {
			p.open++
		}
		p.mu.Unlock()
		closeAll(old)
		return c, nil
	}
	ready := make(chan *conn, 1) // receives a connection, or nil for a slot
	place := p.waiters.PushBack(ready)
	p.mu.Unlock()

	ctx, done := call.interruptible()
	defer done()
	var late <-chan time.Time
	if limit > 0 {
		timer := time.NewTimer(limit)
		defer timer.Stop()
		late = timer.C
	}
	select {
	case c := <-ready:
		return c, nil
	case <-ctx.Done():
		p.leave(place)
		return nil, call.waitError()
	case <-late:
		p.leave(place)
		return nil, errTimeout
	}
}

// leave gives up a place in the queue, and returns a connection or slot that the place
// has received in the meantime.
func (p *pool) leave(place *list.Element) {
	p.mu.Lock()
	ready := p.waiters.Remove(place).(chan *conn)
	p.mu.Unlock()
	select {
	case c := <-ready:
		if c != nil {
			p.give(c)
		} else {
			p.drop()
		}
	default:
	}
}

// swap exchanges a slot for an idle connection if there is one. Otherwise it returns
// nil and the caller keeps the slot.
func (p *pool) swap() *conn {
	p.mu.Lock()
	c, old := p.pop()
	if c != nil {
		p.open--
	}
	p.mu.Unlock()
	closeAll(old)
	return c
}

// give returns a connection that can carry another request to the pool.
func (p *pool) give(c *conn) {
	c.served = true
	p.mu.Lock()
	if ready := p.first(); ready != nil {
		ready <- c
		p.mu.Unlock()
		return
	}
	if len(p.idle) >= p.maxIdle {
		p.open--
		p.mu.Unlock()
		c.Close()
		return
	}
	c.idleSince = time.Now()
	p.idle = append(p.idle, c)
	if !p.armed {
		p.arm(p.idleTimeout)
	}
	p.mu.Unlock()
}

// drop returns a slot whose connection is closed or was never opened to the pool.
func (p *pool) drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ready := p.first(); ready != nil {
		ready <- nil
		return
	}
	p.open--
}

// first removes and returns the channel of the call that has waited longest, or nil.
// The caller sends on it before it releases mu, so that leave finds the value. mu is
// held.
func (p *pool) first() chan *conn {
	place := p.waiters.Front()
	if place == nil {
		return nil
	}
	return p.waiters.Remove(place).(chan *conn)
}

// pop removes and returns the newest idle connection. If that one is too old, all are:
// pop then returns all as old, and the caller closes them. mu is held.
func (p *pool) pop() (c *conn, old []*conn) {
	n := len(p.idle) - 1
	if n < 0 {
		return nil, nil
	}
	if time.Since(p.idle[n].idleSince) >= p.idleTimeout {
		return nil, p.shed(n + 1)
	}
	c = p.idle[n]
	p.idle[n] = nil
	p.idle = p.idle[:n]
	return c, nil
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
