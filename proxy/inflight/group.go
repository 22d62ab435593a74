// Package inflight counts work in progress and lets goroutines wait until no work is
// left.
//
// The decisions behind this package are in docs/design/edge.md.
package inflight

import "sync"

// Group counts pieces of work. Unlike a sync.WaitGroup, new work may start while the
// count is zero and another goroutine waits. The zero value has no work. Safe for
// concurrent use.
type Group struct {
	mu    sync.Mutex
	count int           // guarded by mu
	idle  chan struct{} // closed when count falls to zero; nil: no goroutine waits; guarded by mu
}

// Add counts one more piece of work. The caller must call Done when that work ends.
func (g *Group) Add() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.count++
}

// Done counts the end of one piece of work.
func (g *Group) Done() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.count--; g.count == 0 && g.idle != nil {
		close(g.idle)
		g.idle = nil
	}
}

// Go runs f in a new goroutine and counts it.
func (g *Group) Go(f func()) {
	g.Add()
	go func() { // Wait also waits for f
		defer g.Done()
		f()
	}()
}

// Idle returns a channel that is closed as soon as no work is under way. The channel
// stays closed when new work starts later.
func (g *Group) Idle() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.count == 0 {
		return alreadyIdle
	}
	if g.idle == nil {
		g.idle = make(chan struct{})
	}
	return g.idle
}

var alreadyIdle = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// Wait returns at a moment at which no work is under way.
func (g *Group) Wait() { <-g.Idle() }
