package engine

import (
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// Circuit is whether a Breaker lets requests through.
type Circuit uint8

// The circuits.
const (
	CircuitClosed   Circuit = iota // requests pass
	CircuitHalfOpen                // one trial request may pass
	CircuitOpen                    // none should pass
)

// Breaker is the passive health of an instance or a pair: so many failures in a
// row open the circuit; after a while one trial request may pass, and any
// success closes it. A trial that ends without a word (its client left) is
// followed by another after the same while. All methods are lock-free and safe
// for concurrent use. The zero Breaker never opens.
type Breaker struct {
	config   *atomic.Pointer[config.Circuit] // shared with the registry, which replaces it on reload
	tell     func(failed bool)               // where this is a mirror: hears of each failure, and of a success that changes something
	base     time.Time                       // until counts from here, on the monotonic clock
	failures atomic.Int32                    // in a row
	until    atomic.Int64                    // ns since base at which an open circuit is half open; 0: closed
}

// arm makes the breaker open by the rule that c holds at the time.
func (b *Breaker) arm(c *atomic.Pointer[config.Circuit]) {
	// A second back, so that no time since base is 0, which means closed.
	b.config, b.base = c, time.Now().Add(-time.Second)
}

// Circuit returns the circuit as it stands at now.
func (b *Breaker) Circuit(now time.Time) Circuit {
	switch until := b.until.Load(); {
	case until == 0:
		return CircuitClosed
	case int64(now.Sub(b.base)) < until:
		return CircuitOpen
	}
	return CircuitHalfOpen
}

// Allow asks to send a request now and takes the trial when the circuit is half
// open. The outcome is told by Success or Failure.
func (b *Breaker) Allow() bool {
	until := b.until.Load()
	if until == 0 {
		return true
	}
	now := b.now()
	return now >= until && b.until.CompareAndSwap(until, now+b.openFor())
}

// Success notes that a leg was served, and closes the circuit.
func (b *Breaker) Success() {
	news := false
	if b.failures.Load() != 0 {
		b.failures.Store(0)
		news = true
	}
	if b.until.Load() != 0 {
		b.until.Store(0)
		news = true
	}
	if news && b.tell != nil {
		b.tell(false)
	}
}

// Failure notes that a leg failed by the engine's fault. In an open circuit it
// changes nothing: legs begun before it opened fail late, and a trial has set
// its own time already.
func (b *Breaker) Failure() { b.fail(false) }

// Trip notes a failure that opens the circuit by itself, however few came before.
func (b *Breaker) Trip() { b.fail(true) }

func (b *Breaker) fail(trip bool) {
	if b.config == nil {
		return
	}
	if b.tell != nil {
		b.tell(true)
	}
	n := b.failures.Add(1)
	until, now := b.until.Load(), b.now()
	if until > now || until == 0 && !trip && int(n) < b.config.Load().Failures {
		return
	}
	b.until.CompareAndSwap(until, now+b.openFor())
}

// Failures returns the number of failures in a row.
func (b *Breaker) Failures() int { return int(b.failures.Load()) }

func (b *Breaker) now() int64 { return int64(time.Since(b.base)) }

func (b *Breaker) openFor() int64 { return int64(b.config.Load().OpenFor) }
