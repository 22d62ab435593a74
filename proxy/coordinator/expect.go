package coordinator

import (
	"context"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// mostExpectations bounds the expectations that wait to be noted. What comes
// beyond is not expected: events will tell.
const mostExpectations = 1024

// expectation is blocks that will come to be at a target, or will not after all.
// To note a long prompt takes longer than to place it, so that Run does it, in
// the order of placements and releases.
type expectation struct {
	target kvindex.Target
	blocks *[]kvindex.Hash // a copy, of expectations.pool; Run's until it has ended
	at     time.Time
	end    ending
}

// ending says what became of an expectation.
type ending uint8

const (
	pending ending = iota
	came
	failed
)

// expectations is the queue between placements and Run.
type expectations struct {
	index *kvindex.Index
	queue chan expectation
	pool  sync.Pool // *[]kvindex.Hash
}

func newExpectations(index *kvindex.Index) *expectations {
	return &expectations{
		index: index, queue: make(chan expectation, mostExpectations),
		pool: sync.Pool{New: func() any { return new([]kvindex.Hash) }},
	}
}

// Run notes what placements expect until ctx ends.
func (l *Local) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-l.expectations.queue:
			l.expectations.note(e)
		}
	}
}

// note takes one expectation in.
func (x *expectations) note(e expectation) {
	switch e.end {
	case pending:
		x.index.Expect(e.target, *e.blocks, e.at)
		return
	case failed:
		x.index.Unexpect(e.target, *e.blocks)
	}
	x.pool.Put(e.blocks)
}

// add queues the expectation that blocks come to a target; blocks is nil if the
// queue is full.
func (x *expectations) add(target kvindex.Target, blocks []kvindex.Hash, now time.Time) (e expectation) {
	e = expectation{target: target, blocks: x.pool.Get().(*[]kvindex.Hash), at: now}
	*e.blocks = append((*e.blocks)[:0], blocks...)
	select {
	case x.queue <- e:
		return e
	default:
		x.pool.Put(e.blocks)
		return expectation{}
	}
}

// finish ends an expectation.
func (x *expectations) finish(e expectation, how ending) {
	if e.blocks == nil {
		return
	}
	e.end = how
	select {
	case x.queue <- e:
	default: // one that failed ends by its own time
	}
}

// expect has it noted that the request's blocks will be where it was placed.
// The lease takes back what never came to be.
func (l *Local) expect(a *Ask, t *table, g *grant, now time.Time) {
	g.Matched = -1
	computes := g.Decode
	if !g.Prefill.IsZero() {
		g.lease.expected[1] = l.expectAt(t, g.Decode, now)
		computes = g.Prefill
	}
	m, chain := t.held(computes)
	if chain == nil || !a.Prefill.IsZero() { // the prompt has been computed
		return
	}
	if !chain.Form.Text {
		g.Matched = int64(m.Blocks()) * int64(chain.Form.Block)
	}
	g.lease.expected[0] = l.expectAt(t, computes, now)
}

// expectAt expects what of the request's blocks a target does not hold yet. Those
// of text are expected again, for nothing else says that they are still there.
func (l *Local) expectAt(t *table, target engine.Target, now time.Time) expectation {
	m, chain := t.held(target)
	if chain == nil {
		return expectation{}
	}
	blocks := chain.Blocks
	if !chain.Form.Text {
		blocks = blocks[m.Blocks():]
	}
	if len(blocks) == 0 {
		return expectation{}
	}
	return l.expectations.add(target.KV[target.Rank], blocks, now)
}
