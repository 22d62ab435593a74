// Package indexcheck compares the KV index with the engines' reports: the number of
// prompt tokens that a target held according to the index, and the number that the
// engine's usage reports as cached. If the two disagree repeatedly, it names the engine
// and the likely reason. It does no I/O, has no clock and is safe for concurrent use.
//
// The decisions behind this package are in docs/design/engines.md.
package indexcheck

import (
	"slices"
	"strings"
	"sync"
)

// Reason is the likely reason of a disagreement. The names are labels of metrics and logs.
type Reason uint8

// The reasons.
const (
	Agrees Reason = iota
	// TokenizerMismatch: the proxy's token ids differ from the engine's. The engine sends
	// events, but none of its prompts is ever found in them; or, without events, nothing
	// that was sent there is ever cached.
	TokenizerMismatch
	// MissingEvents: the engine has cached blocks that the index lacks.
	MissingEvents
	// StaleIndex: the index has blocks that the engine no longer has.
	StaleIndex
)

var reasonNames = [...]string{Agrees: "agrees", TokenizerMismatch: "tokenizer_mismatch",
	MissingEvents: "missing_events", StaleIndex: "stale_index"}

func (r Reason) String() string { return reasonNames[r] }

// Observation is one request with the cached tokens that its engine reported. Requests
// without token ids, and answers without a number of cached tokens, are no observations.
type Observation struct {
	Engine string // instance that served prefill
	Rank   int
	// Exact: the engine's events feed the index of this target. A surplus of the engine
	// counts against the engine only if Exact is set.
	Exact bool
	// Stored is the number of blocks in the target's events so far.
	Stored uint64

	Prompt    int // tokens
	Predicted int // number of these blocks that the target held according to the index when the target was chosen
	Reported  int // number of these blocks that were cached according to the engine
	// Held is the number of tokens that the target holds according to its events alone. The proxy
	// looks it up after the answer. Blocks that the proxy only expects, because it sent their
	// prompt, do not count: they have the proxy's own ids, and prove nothing about the engine's
	// ids. Because the lookup is late, events that a burst of equal prompts delays do not count as
	// missing. Held has no meaning unless Exact is set.
	Held  int
	Block int // tokens a block; 0: not known
}

// slack is the allowed difference between prediction and report. Engines always compute the last
// token of a prompt, and with it the token's block. Also, blocks can be added and evicted between
// the choice and prefill.
func (o *Observation) slack() int {
	block := o.Block
	if block <= 0 {
		block = 32
	}
	return 2*block + o.Prompt/16
}

// Surplus reports whether the engine had more cached than slack explains. Only then, and
// if Exact, is Held needed.
func (o *Observation) Surplus() bool { return o.Reported > o.slack() }

// Verdict is the result of an engine's recent requests. It counts only informative
// requests; a prompt with few cached tokens is not informative.
type Verdict struct {
	Engine string
	Rank   int // rank to which the verdict applies; All: the whole engine
	Reason Reason

	Requests, Against   int // number of informative requests, and number of those that disagree
	Predicted, Reported int // tokens, over all of them
}

// All is the Rank of a verdict about a whole engine.
const All = -1

// A verdict uses the last observations of all ranks of an engine, or the last
// observations of one rank that differs from the other ranks. A healthy engine under
// memory pressure evicts blocks between placement and prefill, so some observations
// disagree. Therefore a verdict needs a certain share of disagreeing observations, and
// ends only at a much lower share.
const (
	window      = 100
	engineLeast = 20 // informative requests, for a verdict about an engine
	engineShare = 65 // per cent of them that disagree one way
	rankWindow  = 24
	rankLeast   = 12
	rankShare   = 85
	calmLeast   = 5
	calmShare   = 30 // below it the verdict ends
	latest      = 24 // number of latest informative requests that determine the reason
)

// Check keeps the verdicts. Its zero value is not usable; see New.
type Check struct {
	notify func(Verdict)

	mu      sync.Mutex
	engines map[string]*record // guarded by mu
}

// New returns a Check. notify is called once for each change of a verdict, including
// Agrees after a disagreement, by the goroutine of the observation and without a lock. It
// may be nil.
func New(notify func(Verdict)) *Check {
	if notify == nil {
		notify = func(Verdict) {}
	}
	return &Check{notify: notify, engines: make(map[string]*record)}
}

// Observe adds one request.
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

// Forget removes an engine that left or restarted. It does not call notify.
func (c *Check) Forget(engine string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.engines, engine)
}

// Verdicts returns the verdicts of all observed engines by name.
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
