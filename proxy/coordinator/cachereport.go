package coordinator

import (
	"context"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/indexcheck"
)

// Computed compares the number of cached tokens that an engine reports with the index. key
// is the key of the placement.
func (l *Local) Computed(p *Placement, key *Key, prompt, cached int64) {
	l.Compare(p, p.CacheReport(key, prompt, cached))
}

// CacheReport returns the report of the engine that computes p's prompt. Its Blocks
// alias those of key.
func (p *Placement) CacheReport(key *Key, prompt, cached int64) CacheReport {
	block := p.computer().BlockTokens()
	return CacheReport{Block: block, Blocks: key.reported(block, cached), Prompt: prompt, Cached: cached}
}

// computer returns the target that computes the prompt.
func (p *Placement) computer() engine.Target {
	if p.Prefill.IsZero() {
		return p.Decode
	}
	return p.Prefill
}

// Compare compares an engine's report with the state of the index at the time of the
// placement p.
func (l *Local) Compare(p *Placement, r CacheReport) {
	target := p.computer()
	if l.state.Trust == nil || p.Matched < 0 || len(target.KV) <= target.Rank || r.Block != target.BlockTokens() {
		return
	}
	slot := target.KV[target.Rank]
	o := indexcheck.Observation{
		Engine: target.Name(), Rank: target.Rank, Exact: true, Stored: l.state.Index.Counts(slot).Stored,
		Prompt: int(r.Prompt), Predicted: int(p.Matched), Reported: int(r.Cached), Block: r.Block,
	}
	if len(r.Blocks) > 0 {
		l.comparisons.compare(slot, r.Blocks, o)
		return
	}
	l.state.Trust.Observe(o)
}

// Run does the comparisons that reports of engines leave, until ctx ends.
func (l *Local) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case c := <-l.comparisons.queue:
			l.comparisons.run(c)
		}
	}
}
