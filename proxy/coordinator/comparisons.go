package coordinator

import (
	"github.com/pdproxy/pdproxy/proxy/state/indexcheck"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// maxWaiting bounds the comparisons that wait for Run. Further ones are dropped: other requests
// are compared.
const maxWaiting = 1024

// comparison is a comparison of the cached tokens that an engine reports with the index. Run
// does it later, because it walks through all blocks of a long prompt.
type comparison struct {
	target kvindex.Target
	blocks *[]kvindex.Hash // a copy from copies, to which Run returns it
	seen   indexcheck.Observation
}

// comparisons is the queue of comparisons. Run does them in order.
type comparisons struct {
	state State
	queue chan comparison
}

func newComparisons(state State) *comparisons {
	return &comparisons{state: state, queue: make(chan comparison, maxWaiting)}
}

func (q *comparisons) run(c comparison) {
	c.seen.Held = q.state.Index.Vouched(c.target, *c.blocks) * c.seen.Block
	q.state.Trust.Observe(c.seen)
	copies.Put(c.blocks)
}

// compare queues a comparison of the cached tokens that an engine reports with its events.
func (q *comparisons) compare(target kvindex.Target, blocks []kvindex.Hash, o indexcheck.Observation) {
	c := comparison{target: target, blocks: copyOf(blocks), seen: o}
	select {
	case q.queue <- c:
	default:
		copies.Put(c.blocks)
	}
}
