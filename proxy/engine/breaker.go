package engine

import (
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// Circuit is the state of a Breaker: whether requests may pass.
type Circuit uint8

// The circuits.
const (
	CircuitClosed   Circuit = iota // requests pass
	CircuitHalfOpen                // one trial request may pass
	CircuitOpen                    // none should pass
)

// Breaker is the passive health of an instance or a pair. Consecutive failures open the
// circuit. After a time, one trial request may pass, and any success closes the
// circuit. If a trial ends without a result (its client left), another one may pass
// after the same time. All methods are lock-free and safe for concurrent use. The zero
// Breaker never opens.
type Breaker struct {
	config   *atomic.Pointer[config.Circuit] // shared with the registry, which replaces it on reload
	report   func(failed bool)               // in a mirror: called for each failure, and for a success that changes something
	grows    bool                            // each opening in a row lasts twice as long
	openings atomic.Int32                    // in a row, if grows is set
	opened   chan<- struct{}                 // gets a signal when the circuit opens; nil: none
	base     time.Time                       // origin of until, on the monotonic clock
	failures atomic.Int32                    // in a row
	until    atomic.Int64                    // ns since base at which an open circuit is half open; 0: closed
}

// arm connects the breaker to its configuration, which c holds.
func (b *Breaker) arm(c *atomic.Pointer[config.Circuit]) {
	// One second back, so that no time since base is 0, which means closed.
	b.config, b.base = c, time.Now().Add(-time.Second)
}

// Circuit returns the circuit at now.
func (b *Breaker) Circuit(now time.Time) Circuit {
	switch until := b.until.Load(); {
	case until == 0:
		return CircuitClosed
	case int64(now.Sub(b.base)) < until:
		return CircuitOpen
	}
	return CircuitHalfOpen
}

// Allow reports whether a request may be sent now, and takes the trial of a half-open
// circuit. The caller reports the outcome by Success or Failure.
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
		b.openings.Store(0)
		news = true
	}
	if news && b.report != nil {
		b.report(false)
	}
}

// Failure notes that a leg failed by the engine's fault. It changes nothing in an open
// circuit: legs that began earlier fail late, and a trial has already set its own time.
func (b *Breaker) Failure() { b.fail(false) }

// Trip notes a failure that opens the circuit at once, whatever the number of earlier
// failures.
func (b *Breaker) Trip() { b.fail(true) }

func (b *Breaker) fail(trip bool) {
	if b.config == nil {
		return
	}
	if b.report != nil {
		b.report(true)
	}
	n := b.failures.Add(1)
	until, now := b.until.Load(), b.now()
	if until > now || until == 0 && !trip && int(n) < b.config.Load().Failures {
		return
	}
	if b.until.CompareAndSwap(until, now+b.openFor()) {
		signal(b.opened)
	}
}

// halve makes an open circuit half open.
func (b *Breaker) halve() {
	if until := b.until.Load(); until != 0 {
		b.until.CompareAndSwap(until, min(until, b.now()))
	}
}

// Failures returns the number of failures in a row.
func (b *Breaker) Failures() int { return int(b.failures.Load()) }

func (b *Breaker) now() int64 { return int64(time.Since(b.base)) }

// openFor returns how long the circuit that opens now, or whose trial begins now, stays open. A
// circuit that grows stays open for at most longestOpen, or for circuit.open_for if that is longer.
func (b *Breaker) openFor() int64 {
	d := time.Duration(b.config.Load().OpenFor)
	if b.grows {
		n := min(b.openings.Add(1)-1, 10)
		d = max(d, min(d<<n, longestOpen))
	}
	return int64(d)
}

// longestOpen limits how long the circuit of a pair stays open between two trials.
const longestOpen = 2 * time.Minute
