package coordinator

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/state/predict"
)

// Observer receives what a Placement cannot contain: the fallbacks of a Place that failed,
// and each issued id. Safe for concurrent use.
type Observer interface {
	Fallback(what, reason string)
	Minted(policy string)
}

// Local is the Coordinator that decides by the state of this process. It alone issues the
// disagg ids of its node and worker number. Safe for concurrent use.
type Local struct {
	registry  *engine.Registry
	decider   atomic.Pointer[Decider]
	fallback  Decider
	state     State
	mint      *disaggid.Source
	observer  Observer
	live      disaggid.Live
	open      atomic.Int64
	sequences sequenceTable
	times     predict.Table // of the engines, if a policy needs predictions

	comparisons *comparisons
	tables      sync.Pool
}

var _ Coordinator = (*Local)(nil)

// NewLocal returns a coordinator that uses the decisions of d. If d has no answer,
// fallback decides; fallback must always have an answer.
func NewLocal(registry *engine.Registry, d, fallback Decider, state State, mint *disaggid.Source, observer Observer) *Local {
	l := &Local{registry: registry, fallback: fallback, state: state, mint: mint, observer: observer, comparisons: newComparisons(state)}
	l.tables.New = func() any { return &table{pool: &l.tables, types: &l.times} }
	l.SetDecider(d)
	return l
}

// SetDecider replaces the Decider for later placements.
func (l *Local) SetDecider(d Decider) { l.decider.Store(&d) }

// Open returns the number of leases that are not released.
func (l *Local) Open() int { return int(l.open.Load()) }

// LiveIDs returns the number of disagg ids in flight.
func (l *Local) LiveIDs() int { return l.live.Len() }

// Ready reports whether one request could be placed now, and every engine known at the start has
// been looked at.
func (l *Local) Ready() bool { return l.registry.Settled() && l.registry.Snapshot().Ready() }

// Needs implements Coordinator.
func (l *Local) Needs() abi.Needs { return (*l.decider.Load()).Needs() }

// Headers implements Coordinator.
func (l *Local) Headers() []string { return (*l.decider.Load()).Headers() }

// committed is a placement and its lease in one allocation.
type committed struct {
	Placement
	lease Lease
}

// Place decides and commits a placement. In steady state it allocates only the placement,
// if placements are recycled.
//
// Targets with an open circuit, and excluded targets, are candidates only if the phase
// has no other targets: a request to an engine that failed before may succeed. The
// exception is decode with an open circuit: prefill would compute and hold KV that no
// decode reads.
func (l *Local) Place(ctx context.Context, a *Ask) (*Placement, error) {
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
	needs := d.Needs()
	if !a.Only.Decode.IsZero() {
		needs = 0
	}
	t.reset(pool, a, needs)
	l.recall(pool, a, t)
	g := &committed{lease: Lease{local: l}}
	g.table = t
	if err := l.decide(ctx, d, snapshot, pool, a, t, g); err != nil {
		for _, f := range g.Fallbacks {
			l.observer.Fallback(f.What, f.Reason)
		}
		t.recycle()
		return nil, err
	}
	g.Facts, g.Targets, g.Lease = t.place, t.targets, &g.lease
	return &g.Placement, nil
}

// Lend gives p, a placement that another process decided, empty Facts.Candidates and
// Targets with memory to append to. Recycle takes that memory back.
func (l *Local) Lend(p *Placement) {
	t := l.tables.Get().(*table)
	p.table, p.Facts.Candidates, p.Targets = t, t.place.Candidates[:0], t.targets[:0]
}

// Snapshot returns the engines that placements are made on now.
func (l *Local) Snapshot() *engine.Snapshot { return l.registry.Snapshot() }

// resolve returns the pool of the model that the client named, or the only pool if it
// named none.
func resolve(s *engine.Snapshot, model string) (*engine.Pool, error) {
	if model == "" {
		switch p, count := s.Only(); {
		case p != nil:
			return p, nil
		case count > 1:
			return nil, ErrModelNeeded
		}
		return nil, &NoTargetError{}
	}
	if p, ok := s.Pool(model); ok {
		return p, nil
	}
	if s.Unlearned || len(s.Instances) == 0 { // engines that have not reported their models may serve it
		return nil, &NoTargetError{Model: model}
	}
	return nil, ErrUnknownModel
}

// recall looks up the request's blocks and its conversation.
func (l *Local) recall(pool *engine.Pool, a *Ask, t *table) {
	first := false // the exchange's first placement of a request that begins a conversation
	if t.needs&abi.NeedConversation != 0 && l.state.Conversations != nil {
		if !a.Lookup.Done {
			a.Key.Conversation.Scope = kvindex.Seed(pool.Model, "", "")
			a.Found(l.state.Conversations.Look(a.Key.Conversation))
			first = a.Lookup.Turn.Begins()
		}
		t.turn = a.Lookup.Turn
		t.place.Request.Turn, t.place.Request.Conversation = a.Request.Turn, a.Request.Conversation
	}
	if t.needs&abi.NeedBlocks != 0 && l.state.Index != nil {
		t.match(l.state.Index, a.Key.Chains)
		if first {
			t.place.Request.Shared = l.sequences.of(pool, l.registry.Snapshot()).begun.Add(t.beginning())
		}
	}
}

// decide does the steps of a placement: plan, place, mint, commit.
func (l *Local) decide(ctx context.Context, d Decider, s *engine.Snapshot, pool *engine.Pool, a *Ask, t *table, g *committed) error {
	now := time.Now()
	if !a.Only.Decode.IsZero() && a.Prefill.IsZero() {
		return l.decideOnly(ctx, d, pool, a, t, g, now)
	}
	two := !a.Prefill.IsZero() || a.Two && a.Aggregate == 0 && !a.Request.PairBroken
	if !two && a.Aggregate == 0 && !a.Request.PairBroken {
		var err error
		if two, err = l.plan(ctx, d, pool, a, t, g, now); err != nil {
			return err
		}
	}
	switch {
	case !two:
		if t.fillAggregated(pool, a, now); len(t.targets) == 0 {
			return &NoTargetError{Model: a.Model}
		}
	case !a.Prefill.IsZero():
		if !t.fillFixed(l.registry, pool, a, now) {
			return &NoTargetError{Phase: fixedLacks(pool, a), Model: a.Model}
		}
	default:
		if missing, ok := t.fillPairs(pool, a, now); !ok {
			return &NoTargetError{Phase: missing, Model: a.Model}
		}
	}
	t.keepSame(a)
	if two && t.needs&abi.NeedPairs != 0 {
		t.fillStates(l.registry)
	}
	t.place.Sequence = l.sequences.of(pool, s).next(a, two)
	t.place.Random = rand.Uint64()
	chosen := l.choose(ctx, d, t, g, now)
	if chosen.Decode < 0 {
		return &NoTargetError{Phase: abi.Decode, Model: a.Model}
	}
	return l.commit(ctx, d, a, t, g, chosen, now)
}

// decideOnly places both legs on the targets of a.Only, a pair that the proxy has claimed. Both
// engines must be idle, unless the request is the trial of a broken pair.
func (l *Local) decideOnly(ctx context.Context, d Decider, pool *engine.Pool, a *Ask, t *table, g *committed, now time.Time) error {
	p, e := a.Only.Prefill, a.Only.Decode
	if !l.blocked(p, e, now) && !(p.Free(now) && e.Free(now)) {
		return &NoTargetError{Model: a.Model}
	}
	if _, ok := t.fillPairs(pool, a, now); !ok {
		return &NoTargetError{Model: a.Model}
	}
	chosen := abi.PlaceDecision{Prefill: t.row(p, abi.RolePrefill), Decode: t.row(e, abi.RoleDecode)}
	if chosen.Prefill < 0 || chosen.Decode < 0 || !t.place.Allows(chosen) || !t.claim(chosen.Prefill) || !t.claim(chosen.Decode) {
		return &NoTargetError{Model: a.Model}
	}
	return l.commit(ctx, d, a, t, g, chosen, now)
}

// plan calls the plan policy, which decides the number of legs.
func (l *Local) plan(ctx context.Context, d Decider, pool *engine.Pool, a *Ask, t *table, g *committed, now time.Time) (two bool, err error) {
	t.plan = abi.PlanFacts{
		Request:        t.place.Request,
		PrefillTargets: pool.Plan.Prefill,
		DecodeTargets:  pool.Plan.Decode,
		BothTargets:    pool.Plan.Both,
	}
	if t.needs&abi.NeedBlocks != 0 {
		t.fillCosts(pool, now)
	}
	answer, policy, ok := d.Plan(ctx, &t.plan)
	g.Notes = append(g.Notes, t.plan.Notes...)
	switch {
	case !ok:
		g.fallback("plan", policy)
	case !sound(answer):
		g.fallback("plan", ReasonNonsense)
		ok = false
	default:
		limit := time.Duration(answer.LimitMillis) * time.Millisecond
		if answer.Decision == abi.PlanHold {
			return false, &HeldError{Limit: limit}
		}
		g.FirstByte = limit
		ok = answer.Decision != abi.PlanPass // PlanPass leaves the decision to the native rule
	}
	if !ok {
		answer, _, _ = l.fallback.Plan(ctx, &t.plan)
	}
	switch answer.Decision {
	case abi.PlanDisaggregate:
		return true, nil
	case abi.PlanAggregate:
		if pool.Pairs && pool.Plan.Prefill == 0 && pool.Configured.Prefill > 0 && pool.Configured.Decode > 0 {
			g.fallback("plan", "no_"+lacks(pool).String())
		}
		return false, nil
	}
	if pool.Plan.Prefill == 0 && pool.Plan.Both == 0 {
		return false, &NoTargetError{Phase: lacks(pool), Model: a.Model}
	}
	return false, &RejectedError{Status: int(answer.Status)}
}

// sound reports whether a plan answer follows the contract.
func sound(a abi.PlanAnswer) bool {
	return a.Decision <= abi.PlanHold &&
		(a.Status == 0 || a.Decision == abi.PlanReject && a.Status >= 400 && a.Status <= 599)
}

// lacks returns the phase for which the pool has no ready target. Prefill: both phases
// have targets, but no two targets can be paired. PhaseNone: no connector uses pairs.
func lacks(pool *engine.Pool) abi.Phase {
	if !pool.Pairs {
		return abi.PhaseNone
	}
	var roles abi.Role
	for i := range pool.Ready {
		if f := &pool.Ready[i].Facts; f.Group != 0 {
			roles |= f.Roles
		}
	}
	if roles == abi.RolePrefill {
		return abi.Decode
	}
	return abi.Prefill
}

// fixedLacks returns the missing phase if the prefill target is kept.
func fixedLacks(pool *engine.Pool, a *Ask) abi.Phase {
	if _, ok := pool.Group(a.Prefill); !ok {
		return abi.Prefill
	}
	return abi.Decode
}

// commit mints the id unless it is kept, takes the loads and records the conversation. It
// changes nothing if there is no id.
func (l *Local) commit(ctx context.Context, d Decider, a *Ask, t *table, g *committed, chosen abi.PlaceDecision, now time.Time) error {
	g.Decode = t.targets[chosen.Decode]
	g.Flow = abi.FlowAggregated
	lease := &g.lease
	if chosen.Prefill >= 0 {
		g.Prefill = t.targets[chosen.Prefill]
		g.Flow = g.Prefill.Flow
		if g.ID = a.ID; g.ID != 0 {
			l.live.Hold(g.ID)
		} else if g.ID = l.mintID(ctx, d, t, g); g.ID == 0 {
			return ErrNoID
		}
		lease.id = g.ID
	}
	t.place.Flow = g.Flow
	prompt := a.Request.PromptTokens
	b := Charge{Prompt: prompt, Queued: -1, Tokens: prompt + expected(&a.Request)}
	switch {
	case chosen.Prefill < 0:
		b.Queued = uncached(prompt, &t.place.Candidates[chosen.Decode])
		g.Decode.Load[g.Decode.Rank].Placed(b.Queued, now)
	case a.Prefill.IsZero():
		b.Queued = uncached(prompt, &t.place.Candidates[chosen.Prefill])
		g.Prefill.Load[g.Prefill.Rank].Placed(b.Queued, now)
	}
	if t.needs&abi.NeedPredictions != 0 && b.Queued >= 0 {
		lease.times = t.measure(prompt, chosen, g, now)
	}
	lease.carry(g.Prefill, g.Decode, b, now)
	l.open.Add(1)
	l.expect(a, t, g, now)
	if a.Lookup.Done && l.state.Conversations != nil {
		prefill := g.Prefill
		if prefill.IsZero() {
			prefill = g.Decode
		}
		l.state.Conversations.Record(a.Lookup.Turn, homeOf(prefill), homeOf(g.Decode), now)
		g.Turn = a.Lookup.Turn
	}
	return nil
}

// uncached returns how many tokens of a prompt the row's target must still compute.
func uncached(prompt int64, c *abi.Candidate) int64 { return max(0, prompt-c.Matched()) }

// mintID returns an id that is in range and not in flight, and adds it to the ids in
// flight; 0: no id is left.
func (l *Local) mintID(ctx context.Context, d Decider, t *table, g *committed) uint64 {
	var ok bool
	if t.mint, ok = l.mint.Next(); !ok {
		return 0
	}
	id, policy, ok := d.Mint(ctx, &t.mint)
	switch {
	case !ok:
		g.fallback("mint", policy)
	case !disaggid.InRange(id):
		g.fallback("mint", ReasonNonsense)
	case !l.live.Add(id):
		g.fallback("mint", ReasonDuplicate)
	default:
		l.observer.Minted(policy)
		return id
	}
	for {
		// The policy may have made an id from these facts: take new facts.
		facts, ok := l.mint.Next()
		if !ok {
			return 0
		}
		if id = disaggid.Pack(facts); l.live.Add(id) {
			l.observer.Minted(native)
			return id
		}
	}
}

// native names the built-in rules in the place of a policy.
const native = "native"

// Bounds of the expected output tokens. A request without max_tokens counts as an average
// chat answer. A very large max_tokens must not make its target look full.
const (
	usualAnswer  = 512
	longAnswer   = 128 << 10
	mostSequence = 128
)

// expected returns how many tokens decode is expected to produce for a request.
func expected(r *abi.RequestFacts) int64 {
	tokens := r.MaxTokens
	if tokens < 0 {
		tokens = usualAnswer
	}
	return min(tokens, longAnswer) * max(1, min(r.N, mostSequence))
}

// fallback notes that the native rule decided, and why.
func (g *committed) fallback(what, reason string) {
	switch reason {
	case ReasonAbsent:
		return
	case "":
		reason = ReasonFailed
	}
	g.Fallbacks = append(g.Fallbacks, Fallback{What: what, Reason: reason})
}
