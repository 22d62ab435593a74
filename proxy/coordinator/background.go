package coordinator

import (
	"context"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/indexcheck"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// mostWaiting bounds the jobs that wait for Run. Further jobs are dropped: engines' events
// show their blocks later, and other requests are compared.
const mostWaiting = 1024

// job is the part of a placement that Run does later, because it walks through all blocks
// of a long prompt.
type job struct {
	do     work
	target kvindex.Target
	blocks *[]kvindex.Hash // a copy from background.pool; it belongs to Run from expect until the job ends
	at     time.Time
	seen   indexcheck.Observation
}

// work is the kind of a job.
type work uint8

const (
	expect  work = iota // the blocks will be at the target
	came                // the blocks are at the target
	failed              // the blocks will not come to the target
	compare             // compare the engine's report with the index
)

// background is the queue of jobs. Run does them in order.
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

// Run does the jobs that placements leave, until ctx ends.
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

// compare queues a comparison of the cached tokens that an engine reports with its events.
func (b *background) compare(target kvindex.Target, blocks []kvindex.Hash, o indexcheck.Observation) {
	b.add(job{do: compare, target: target, seen: o}, blocks)
}

// end queues the outcome of an expectation.
func (b *background) end(j job, how work) {
	if j.blocks == nil {
		return
	}
	j.do = how
	select {
	case b.queue <- j:
	default: // the index drops an expectation after a time anyway
	}
}

// expect queues jobs that enter the request's blocks at its targets. The end of the lease
// removes the blocks that did not come there.
func (l *Local) expect(a *Ask, t *table, g *committed, now time.Time) {
	g.Matched = -1
	computes := g.Decode
	if !g.Prefill.IsZero() {
		g.lease.expected[1] = l.expectAt(t, g.Decode, now)
		computes = g.Prefill
	}
	m, chain := t.held(computes)
	if chain == nil || !a.Prefill.IsZero() { // the prompt is already computed
		return
	}
	if !chain.Form.Text {
		g.Matched = int64(m.Blocks()) * int64(chain.Form.Block)
	}
	g.lease.expected[0] = l.expectAt(t, computes, now)
}

// expectAt queues the blocks of the request that a target does not hold yet. Blocks of
// text are queued again even if held, because no event confirms that they are still there.
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
