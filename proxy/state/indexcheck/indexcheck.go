// Package indexcheck compares what the KV index predicted with what engines report:
// how many prompt tokens a target was thought to hold, and how many its usage
// says it had cached. Where the two disagree again and again it names the
// engine and the likely reason. It does no I/O, has no clock and is safe for
// concurrent use.
package indexcheck

import (
	"slices"
	"strings"
	"sync"
)

// Reason is why an engine's reports disagree with the index. The names are
// labels of metrics and logs.
type Reason uint8

// The reasons.
const (
	Agrees Reason = iota
	// TokenizerMismatch: the ids that prompts are looked up by are not those
	// that the engine computes. Its events come, yet no prompt of its own is
	// ever found in them; or, without events, nothing that was sent there is
	// ever cached.
	TokenizerMismatch
	// MissingEvents: the engine has cached what the index does not know.
	MissingEvents
	// StaleIndex: the index believes in blocks that the engine no longer has.
	StaleIndex
)

var reasonNames = [...]string{Agrees: "agrees", TokenizerMismatch: "tokenizer_mismatch",
	MissingEvents: "missing_events", StaleIndex: "stale_index"}

func (r Reason) String() string { return reasonNames[r] }

// Observation is one request whose engine has reported its cached tokens.
// Requests without token ids, and answers that say nothing of cached tokens,
// are no observations.
type Observation struct {
	Engine string // instance that served prefill
	Rank   int
	// Exact says that the index of this target is fed by the engine's events.
	// What the engine has beyond the index is only counted against it then.
	Exact bool
	// Stored is how many blocks the target's events have announced so far.
	Stored uint64

	Prompt    int // tokens
	Predicted int // of them held by the target, as the index said when it was chosen
	Reported  int // of them cached, as the engine says
	// Held is how many the target holds by its events alone, once the answer is
	// whole. What the proxy expects there because it sent it there does not
	// count: it is expected by the same ids that it is found by, and so proves
	// nothing of the engine's. Looked up this late, events that lag behind a
	// burst of equal prompts are not taken for events that do not come. It has
	// no meaning unless Exact.
	Held  int
	Block int // tokens a block; 0: not known
}

// slack is how far prediction and report may lie apart: engines compute the
// last token of a prompt in any case, and with it its block; blocks come and go
// between choice and prefill.
func (o *Observation) slack() int {
	block := o.Block
	if block <= 0 {
		block = 32
	}
	return 2*block + o.Prompt/16
}

// Surplus reports whether the engine had more cached than an index without any
// of the prompt explains. Only then, and only if Exact, need Held be looked up.
func (o *Observation) Surplus() bool { return o.Reported > o.slack() }

// Verdict is what the recent requests of an engine say. Counts are those of the
// requests that say something, which cold prompts do not.
type Verdict struct {
	Engine string
	Rank   int // the rank it is about; All: the whole engine
	Reason Reason

	Requests, Against   int // of them, those that disagree
	Predicted, Reported int // tokens, over all of them
}

// All is the Rank of a verdict about a whole engine.
const All = -1

// A verdict rests on the last observations of an engine, those of all its ranks
// together, or on those of one rank that behaves unlike the others. Blocks that
// are evicted between choice and prefill make some requests disagree on a
// healthy engine under pressure; hence the shares, and the distance between
// those that raise a verdict and that which ends it.
const (
	window      = 100
	engineLeast = 20 // informative requests, for a verdict about an engine
	engineShare = 65 // per cent of them that disagree one way
	rankWindow  = 24
	rankLeast   = 12
	rankShare   = 85
	calmLeast   = 5
	calmShare   = 30 // below it the verdict ends
	latest      = 24 // informative requests that tell the reason
)

// Check keeps the verdicts. Its zero value is not usable; see New.
type Check struct {
	notify func(Verdict)

	mu      sync.Mutex
	engines map[string]*record // guarded by mu
}

// New builds a Check. It calls notify once for each change of a verdict, Agrees
// after a disagreement included, from the goroutine of the observation that
// changed it and without a lock; nil: nobody is told.
func New(notify func(Verdict)) *Check {
	if notify == nil {
		notify = func(Verdict) {}
	}
	return &Check{notify: notify, engines: make(map[string]*record)}
}

// Observe takes one request into account.
func (c *Check) Observe(o Observation) {
	c.mu.Lock()
	r := c.engines[o.Engine]
	if r == nil {
		r = &record{ranks: make(map[int]*rankRecord), verdict: Verdict{Engine: o.Engine, Rank: All}}
		c.engines[o.Engine] = r
	}
	verdict, changed := r.observe(&o)
	c.mu.Unlock()
	if changed {
		c.notify(verdict)
	}
}

// Forget drops an engine that left or restarted. Nobody is told.
func (c *Check) Forget(engine string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.engines, engine)
}

// Verdicts gives those of all engines that were observed, by name.
func (c *Check) Verdicts() []Verdict {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make([]Verdict, 0, len(c.engines))
	for _, r := range c.engines {
		all = append(all, r.verdict)
	}
	slices.SortFunc(all, func(a, b Verdict) int { return strings.Compare(a.Engine, b.Engine) })
	return all
}
