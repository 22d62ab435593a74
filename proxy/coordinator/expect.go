package coordinator

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// expectation is the blocks of a request that its placement has entered at a target. The zero
// value has no blocks.
type expectation struct {
	target kvindex.Target
	blocks *[]kvindex.Hash // a copy from copies
}

// end ends the expectation. It removes the blocks from the index unless they came to the target.
func (e *expectation) end(x *kvindex.Index, came bool) {
	if e.blocks == nil {
		return
	}
	if !came {
		x.Unexpect(e.target, *e.blocks)
	}
	copies.Put(e.blocks)
	*e = expectation{}
}

// expect enters the request's blocks at its targets before the request is sent, so that the next
// placement finds them: requests with the same prefix often come at the same time. The end of the
// lease removes the blocks that did not come there.
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

// expectAt enters the blocks of the request that a target does not hold yet. Blocks of text
// are entered again even if held, because no event confirms that they are still there.
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
	kv := target.KV[target.Rank]
	l.state.Index.Expect(kv, blocks, now)
	return expectation{kv, copyOf(blocks)}
}
