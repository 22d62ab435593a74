// Package circuit has the circuit breaker of everything that the proxy asks and that can fail:
// engines, pairs of engines, the endpoint picker, and the tokenize endpoints of engines.
//
// The decisions behind this package are in docs/design/attempt.md.
package circuit

import (
	"sync/atomic"
	"time"
)

// State says whether requests may pass a Breaker.
type State uint8

// The states.
const (
	Closed   State = iota // requests pass
	HalfOpen              // one trial request may pass
	Open                  // none should pass
)

// Rules say when a circuit opens.
type Rules struct {
	Failures int           // failures in a row that open the circuit; at least 1
	OpenFor  time.Duration // time until a trial may pass; > 0
}

// Fixed returns rules that never change.
func Fixed(failures int, openFor time.Duration) *atomic.Pointer[Rules] {
	r := new(atomic.Pointer[Rules])
	r.Store(&Rules{failures, openFor})
	return r
}

// Options configure a Breaker. All but Rules may be zero.
type Options struct {
	Rules  *atomic.Pointer[Rules] // the owner may replace the rules
	Report func(failed bool)      // called for each failure, and for a success that changes something
	Opened chan<- struct{}        // gets a signal when the circuit opens
	Grows  bool                   // each opening in a row lasts twice as long, up to longestOpen
}

// Breaker is the passive health of a peer. Consecutive failures open the
// circuit. After a time, one trial request may pass, and any success closes the
// circuit. If a trial ends without a result (its client left), another one may pass
// after the same time. All methods are lock-free and safe for concurrent use. The zero
// Breaker never opens.
type Breaker struct {
	o        Options
	openings atomic.Int32 // in a row, if Grows is set
	base     time.Time    // origin of until, on the monotonic clock
	failures atomic.Int32 // in a row
	until    atomic.Int64 // ns since base at which an open circuit is half open; 0: closed; last, see engine.Instance
}

// Init connects a zero Breaker to its options, before any other method is called.
func (b *Breaker) Init(o Options) {
	// One second back, so that no time since base is 0, which means closed.
	b.o, b.base = o, time.Now().Add(-time.Second)
}

// Circuit returns the state at now.
func (b *Breaker) Circuit(now time.Time) State {
	switch until := b.until.Load(); {
	case until == 0:
		return Closed
	case int64(now.Sub(b.base)) < until:
		return Open
	}
	return HalfOpen
}

// Closed reports whether the circuit is closed. It reads no clock.
func (b *Breaker) Closed() bool { return b.until.Load() == 0 }

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

// Success notes that a request was served, and closes the circuit.
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
	if news && b.o.Report != nil {
		b.o.Report(false)
	}
}

// Failure notes that a request failed by the peer's fault. It changes nothing in an open
// circuit: requests that began earlier fail late, and a trial has already set its own time.
func (b *Breaker) Failure() { b.fail(false) }

// Trip notes a failure that opens the circuit at once, whatever the number of earlier
// failures.
func (b *Breaker) Trip() { b.fail(true) }

func (b *Breaker) fail(trip bool) {
	if b.o.Rules == nil {
		return
	}
	if b.o.Report != nil {
		b.o.Report(true)
	}
	n := b.failures.Add(1)
	until, now := b.until.Load(), b.now()
	if until > now || until == 0 && !trip && int(n) < b.o.Rules.Load().Failures {
		return
	}
	if b.until.CompareAndSwap(until, now+b.openFor()) {
		b.signal()
	}
}

func (b *Breaker) signal() {
	select {
	case b.o.Opened <- struct{}{}:
	default: // nil, or the receiver has a signal already
	}
}

// Halve makes an open circuit half open.
func (b *Breaker) Halve() {
	if until := b.until.Load(); until != 0 {
		b.until.CompareAndSwap(until, min(until, b.now()))
	}
}

// Failures returns the number of failures in a row.
func (b *Breaker) Failures() int { return int(b.failures.Load()) }

// Copy returns the failures in a row, and one more than the milliseconds until the circuit is
// half open, 0 for a closed circuit. Follow takes both in another process.
func (b *Breaker) Copy(now time.Time) (failures, left uint32) {
	if until := b.until.Load(); until != 0 {
		left = 1 + uint32(max(0, until-int64(now.Sub(b.base)))/int64(time.Millisecond))
	}
	return uint32(b.failures.Load()), left
}

// Follow sets the circuit to the state that Copy returned in another process.
func (b *Breaker) Follow(failures, left uint32) {
	b.failures.Store(int32(failures))
	if left == 0 {
		b.until.Store(0)
	} else if b.until.Swap(b.now()+int64(left-1)*int64(time.Millisecond)) == 0 {
		b.signal()
	}
}

func (b *Breaker) now() int64 { return int64(time.Since(b.base)) }

// openFor returns how long the circuit that opens now, or whose trial begins now, stays open. A
// circuit that grows stays open for at most longestOpen, or for OpenFor if that is longer.
func (b *Breaker) openFor() int64 {
	d := b.o.Rules.Load().OpenFor
	if b.o.Grows {
		n := min(b.openings.Add(1)-1, 10)
		d = max(d, min(d<<n, longestOpen))
	}
	return int64(d)
}

// longestOpen limits how long a circuit that grows stays open between two trials.
const longestOpen = 2 * time.Minute
