package coordinator

import (
	"context"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/indexcheck"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// mostWaiting bounds what waits for Run. What comes beyond is not expected:
// events will tell; nor compared: other requests are.
const mostWaiting = 1024

// job is what a placement leaves for later, because to walk a long prompt's
// blocks one by one takes longer than to place it.
type job struct {
	do     work
	target kvindex.Target
	blocks *[]kvindex.Hash // a copy, of background.pool; Run's from expect to the end of it
	at     time.Time
	seen   indexcheck.Observation
}

// work is what is to be done with a job's blocks.
type work uint8

const (
	expect  work = iota // they will be at the target
	came                // they are
	failed              // they will not be after all
	compare             // with what the engine says it had of them
)

// background is the queue between placements and Run, which keeps its order.
type background struct {
	state State
	queue chan job
	pool  sync.Pool // *[]kvindex.Hash
}

func newBackground(state State) *background {
	return &background{
		state: state, queue: make(chan job, mostWaiting),
		pool: sync.Pool{New: func() any { return new([]kvindex.Hash) }},
	}
}

// Run does what placements leave for later, until ctx ends.
func (l *Local) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case j := <-l.background.queue:
			l.background.run(j)
		}
	}
}

func (b *background) run(j job) {
	switch j.do {
	case expect:
		b.state.Index.Expect(j.target, *j.blocks, j.at)
		return // the blocks are needed again
	case failed:
		b.state.Index.Unexpect(j.target, *j.blocks)
	case compare:
		j.seen.Held = b.state.Index.Vouched(j.target, *j.blocks) * j.seen.Block
		b.state.Trust.Observe(j.seen)
	}
	b.pool.Put(j.blocks)
}

// add queues a job with a copy of blocks; its blocks are nil if the queue is full.
func (b *background) add(j job, blocks []kvindex.Hash) job {
	j.blocks = b.pool.Get().(*[]kvindex.Hash)
	*j.blocks = append((*j.blocks)[:0], blocks...)
	select {
	case b.queue <- j:
		return j
	default:
		b.pool.Put(j.blocks)
		return job{}
	}
}

// compare has the engine's word for a request's cached tokens compared with its
// events'.
func (b *background) compare(target kvindex.Target, blocks []kvindex.Hash, o indexcheck.Observation) {
	b.add(job{do: compare, target: target, seen: o}, blocks)
}

// end says what became of an expectation.
func (b *background) end(j job, how work) {
	if j.blocks == nil {
		return
	}
	j.do = how
	select {
	case b.queue <- j:
	default: // one that failed ends by its own time
	}
}

// expect has it noted that the request's blocks will be where it was placed.
// The lease takes back what never came to be.
func (l *Local) expect(a *Ask, t *table, g *committed, now time.Time) {
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
func (l *Local) expectAt(t *table, target engine.Target, now time.Time) job {
	m, chain := t.held(target)
	if chain == nil {
		return job{}
	}
	blocks := chain.Blocks
	if !chain.Form.Text {
		blocks = blocks[m.Blocks():]
	}
	if len(blocks) == 0 {
		return job{}
	}
	return l.background.add(job{do: expect, target: target.KV[target.Rank], at: now}, blocks)
}
