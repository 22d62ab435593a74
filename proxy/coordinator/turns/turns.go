// Package turns decides how long decode engines retain the KV of finished turns. It asks the retain
// policy, learns the gaps between turns, and frees KV whose time has ended. If the memory of an
// engine is short, it frees the KV whose next turn is the least likely. One Keeper serves a whole
// fleet: that of the coordinator.
//
// The decisions behind this package are in docs/design/attempt.md.
package turns

import (
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/gaps"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

const (
	// maxTurns and maxIDs bound the turns that are known. 32 MB of token ids are more than the
	// engines hold.
	maxTurns = 16 << 10
	maxIDs   = 8 << 20
)

// Decide is the retain policy. by is the name of the policy, and ok is false if it did not decide.
type Decide func(f *abi.RetainFacts) (d abi.RetainDecision, by string, ok bool)

// Observer counts turns. It is safe for concurrent use.
type Observer interface {
	// TurnKept counts KV that an engine no longer retains, by the result and the time for which
	// the engine retained the KV.
	TurnKept(result string, kept time.Duration)
	// Fallback counts a decision that the policy did not make.
	Fallback(what, reason string)
}

// The results of TurnKept.
const (
	Returned = "returned" // the next turn uses the KV
	Unusable = "unusable" // the next turn begins in another way
	Replaced = "replaced" // a newer turn of the conversation has other KV
	Expired  = "expired"  // the time of the policy has ended
	Evicted  = "evicted"  // memory was short
	Freed    = "freed"    // the policy retained nothing
	Recalled = "recalled" // the client did not get the end of the turn
	Drained  = "drained"  // the process ended, or a coordinator its term
)

// Options are the options of New.
type Options[V any] struct {
	Decide   Decide                // nil: all KV is retained until its lease ends
	Free     func(V)               // makes the engine free the KV, in the background
	Counter  func(V) *load.Counter // of the engine that retains the KV; nil: the engine has left
	Observer Observer              // nil: turns are not counted
	Clock    Clock                 // nil: the clock of the machine
}

// Clock is the time of a Keeper.
type Clock interface {
	Now() time.Time
	// AfterFunc calls f after d, unless stop is called before.
	AfterFunc(d time.Duration, f func()) (stop func())
}

// machineClock is the clock of the machine.
type machineClock struct{}

func (machineClock) Now() time.Time { return time.Now() }

func (machineClock) AfterFunc(d time.Duration, f func()) (stop func()) {
	t := time.AfterFunc(d, f)
	return func() { t.Stop() }
}

// CounterOf returns the counter of an engine's load; nil for no engine.
func CounterOf(t engine.Target) *load.Counter {
	if t.IsZero() {
		return nil
	}
	return &t.Load[t.Rank]
}

// uncounted is an Observer that counts nothing.
type uncounted struct{}

func (uncounted) TurnKept(string, time.Duration) {}
func (uncounted) Fallback(string, string)        {}

// Decision is a decision about a turn.
type Decision struct {
	Keep       time.Duration // 0: the KV is freed
	Likelihood float64       // 0 to 1
	Policy     string        // that decided; "native": the rule without a policy
}

// Keeper has the KV of turns, of type V. It frees all KV that it does not return. It is safe for
// concurrent use.
type Keeper[V any] struct {
	o     Options[V]
	shelf *conversation.Shelf[V]
	gaps  *gaps.Table

	mu       sync.Mutex
	stop     func()                      // ends the timer of tick; nil: there is no timer; guarded by mu
	due      time.Time                   // of the timer; guarded by mu
	relieved map[*load.Counter]time.Time // report after which KV of an engine was freed; guarded by mu
}

// New returns an empty keeper.
func New[V any](o Options[V]) *Keeper[V] {
	if o.Decide == nil {
		o.Decide = func(*abi.RetainFacts) (abi.RetainDecision, string, bool) {
			return abi.RetainDecision{}, absent, false
		}
	}
	if o.Observer == nil {
		o.Observer = uncounted{}
	}
	if o.Clock == nil {
		o.Clock = machineClock{}
	}
	return &Keeper[V]{o: o, shelf: conversation.NewShelf[V](maxTurns, maxIDs), gaps: gaps.New(), relieved: make(map[*load.Counter]time.Time)}
}

// Empty reports whether no turn is known.
func (k *Keeper[V]) Empty() bool { return k.shelf.Empty() }

// Put stores the KV of a turn that has just ended. Until, Ended, Likelihood and Turn.Conversation
// of o are those of the keeper.
func (k *Keeper[V]) Put(o conversation.OnShelf[V], now time.Time) Decision {
	o.Turn.Conversation, o.Ended = gaps.ConversationOf(o.Scope, o.Name), now
	d := k.decide(&o, now)
	o.Until, o.Likelihood = now.Add(d.Keep), uint16(d.Likelihood*abi.FullLikelihood)
	if d.Keep == 0 {
		k.leave(&o, Freed, now)
	}
	replaced, evicted, lost := k.shelf.Put(o, now)
	k.leaveAll(replaced, Replaced, now)
	k.leaveAll(evicted, Evicted, now)
	k.loseAll(lost)
	k.schedule(o.Until)
	return d
}

// decide asks the policy how long the KV of a turn is retained.
func (k *Keeper[V]) decide(o *conversation.OnShelf[V], now time.Time) Decision {
	most := max(0, o.Expires.Sub(now))
	f := abi.RetainFacts{MostMillis: uint32(min(most.Milliseconds(), 1<<32-1)), Tokens: int64(len(o.IDs))}
	if c := k.o.Counter(o.Value); c != nil {
		f.Usage = c.View(now).Usage
	}
	k.gaps.Facts(o.Turn, &f)
	d, by, ok := k.o.Decide(&f)
	if !ok {
		if by != absent {
			k.o.Observer.Fallback("retain", by)
		}
		return Decision{Keep: most, Likelihood: 1, Policy: "native"}
	}
	keep := time.Duration(min(d.Millis, f.MostMillis)) * time.Millisecond
	return Decision{Keep: keep, Likelihood: float64(d.Likelihood) / abi.FullLikelihood, Policy: by}
}

// absent is the reason of a Decide without a policy; it is not counted.
const absent = "absent"

// Named reports whether KV of a conversation of that name is retained. late: the KV has been freed, and
// the conversation has returned now.
func (k *Keeper[V]) Named(scope, name string, now time.Time) (retained, late bool) {
	o, retained, late := k.shelf.Named(scope, name)
	if late {
		k.returned(&o, now)
	}
	return retained, late
}

// Take takes the KV of the longest sequence with which ids begins, and returns the time since the
// end of its turn. If there is none, Take frees the KV of that name; "" names none.
func (k *Keeper[V]) Take(scope, name string, ids []uint32, now time.Time) (v V, gap time.Duration, taken, freed bool) {
	if len(ids) > 0 {
		o, hasValue, ok := k.shelf.Take(scope, ids, now)
		if ok {
			k.returned(&o, now)
		}
		if hasValue {
			gap = now.Sub(o.Ended)
			k.o.Observer.TurnKept(Returned, gap)
			return o.Value, gap, true, false
		}
	}
	if name == "" {
		return v, 0, false, false
	}
	o, hasValue, ok := k.shelf.TakeNamed(scope, name)
	switch {
	case hasValue && now.Before(o.Until):
		k.gaps.Lost(o.Turn) // this KV is of no use, as if the turn had not come
		k.leave(&o, Unusable, now)
		return v, 0, false, true
	case hasValue: // tick has not freed it yet
		k.leave(&o, Expired, now)
		k.returned(&o, now)
	case ok:
		k.returned(&o, now)
	}
	return v, 0, false, false
}

// Recall takes the KV of a turn whose end the client did not get. The turn is no
// sample of the time until the next one. taken is false if another request has taken the KV, or if it has been freed.
func (k *Keeper[V]) Recall(scope string, ids []uint32, now time.Time) (v V, taken bool) {
	o, hasValue, _ := k.shelf.Take(scope, ids, now)
	if hasValue {
		k.o.Observer.TurnKept(Recalled, now.Sub(o.Ended))
	}
	return o.Value, hasValue
}

func (k *Keeper[V]) returned(o *conversation.OnShelf[V], now time.Time) {
	k.gaps.Returned(o.Turn, now.Sub(o.Ended))
}

// Clear frees all KV.
func (k *Keeper[V]) Clear(now time.Time) {
	k.leaveAll(k.shelf.TakeAll(), Drained, now)
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.stop != nil {
		k.stop()
		k.stop = nil
	}
	clear(k.relieved)
}

// leaveAll frees KV.
func (k *Keeper[V]) leaveAll(all []conversation.OnShelf[V], result string, now time.Time) {
	for i := range all {
		k.leave(&all[i], result, now)
	}
}

// leave frees the KV of a turn, which has that result.
func (k *Keeper[V]) leave(o *conversation.OnShelf[V], result string, now time.Time) {
	k.o.Observer.TurnKept(result, now.Sub(o.Ended))
	k.o.Free(o.Value)
}

// loseAll records that no turn came after these.
func (k *Keeper[V]) loseAll(all []conversation.OnShelf[V]) {
	for i := range all {
		k.gaps.Lost(all[i].Turn)
	}
}
