package coordinator

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// Reserve decides and commits one phase of a request whose legs another program sends.
// That program reserves the other phase by a second call. Reserve reads these fields of
// a: Model, Request, Key, Within.Prefill or Decode, Excluded and ID. The ID counts as in
// flight until the lease is released; Reserve mints none. The policies see an aggregated
// request whose candidates are the targets of the phase. The placement has only the
// target of the phase, and the lease its load. The end of the phase is PrefillDone for
// prefill and Answered for decode. The errors are those of Place.
func (l *Local) Reserve(ctx context.Context, a *PlacementRequest, phase abi.Phase) (*Placement, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	snapshot := l.registry.Snapshot()
	pool, err := resolve(snapshot, a.Model)
	if err != nil {
		return nil, err
	}
	d := *l.decider.Load()
	t := l.tables.Get().(*table)
	now := time.Now()
	t.reset(pool, a, d.Needs(), now)
	l.recallPhase(snapshot, pool, a, t, phase)
	g := &committed{lease: Lease{of: &l.leases}}
	g.table = t
	if t.fillPhase(pool, a, phase, now); len(t.targets) == 0 {
		g.Facts, g.Targets = t.place, t.targets
		g.Recycle()
		return nil, &NoTargetError{Phase: phase, Model: a.Model}
	}
	t.place.Sequence = l.sequences.of(pool, snapshot).reserve(a, phase)
	t.place.Random = rand.Uint64()
	l.commitPhase(a, t, g, phase, l.choose(ctx, d, t, g, now).Decode, now)
	for _, f := range g.Fallbacks {
		l.observer.Fallback(f.What, f.Reason)
	}
	g.Facts, g.Targets, g.Lease = t.place, t.targets, &g.lease
	return &g.Placement, nil
}

// recallPhase is recall for one phase. The two phases of a turn are reserved one after the
// other. Decode has a separate scope of conversation ids, so that it does not count as the
// next turn.
func (l *Local) recallPhase(s *engine.Snapshot, pool *engine.Pool, a *PlacementRequest, t *table, phase abi.Phase) {
	if phase == abi.Decode && t.needs&abi.NeedConversation != 0 && l.state.Conversations != nil {
		a.Key.Conversation.Scope = kvindex.Seed(pool.Model, "", "decode")
		a.Found(l.state.Conversations.Look(a.Key.Conversation))
	}
	l.recall(s, pool, a, t)
}

// commitPhase commits the row for one phase.
func (l *Local) commitPhase(a *PlacementRequest, t *table, g *committed, phase abi.Phase, row int32, now time.Time) {
	target, lease, prompt := t.targets[row], &g.lease, a.Request.PromptTokens
	g.Flow, g.Matched = target.Flow, -1
	if g.ID = a.ID; g.ID != 0 {
		l.leases.live.Hold(g.ID)
		lease.id = g.ID
	}
	if phase == abi.Decode {
		g.Decode = target
		lease.carry(engine.Target{}, target, Charge{Prompt: prompt, Queued: -1, Tokens: prompt + expected(&a.Request)}, now)
		lease.expected[1] = t.expectAt(target, now)
	} else {
		g.Prefill = target
		queued := max(0, prompt-t.place.Candidates[row].Matched())
		target.Load[target.Rank].Placed(queued, now)
		lease.carry(target, engine.Target{}, Charge{Prompt: prompt, Queued: queued}, now)
		lease.expected[0] = t.expectAt(target, now)
	}
	if m, chain := t.held(target); chain != nil && !chain.Form.Text {
		g.Matched = int64(m.Blocks()) * int64(chain.Form.Block)
	}
	l.leases.open.Add(1)
	if a.Lookup.Done && l.state.Conversations != nil {
		l.state.Conversations.Record(a.Lookup.Turn, homeOf(g.Prefill), homeOf(g.Decode), now)
		g.Turn = a.Lookup.Turn
	}
}
