package coordinator

import (
	"context"
	"errors"
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
	leases    leases
	sequences sequenceTable
	times     predict.Table // of the engines, if a policy needs predictions
	waker     Waker         // nil: requests wake no engine

	comparisons *comparisons
	tables      sync.Pool
}

var _ Coordinator = (*Local)(nil)

// NewLocal returns a coordinator that uses the decisions of d. If d has no answer,
// fallback decides; fallback must always have an answer.
func NewLocal(registry *engine.Registry, d, fallback Decider, state State, mint *disaggid.Source, observer Observer) *Local {
	l := &Local{registry: registry, fallback: fallback, state: state, mint: mint, observer: observer, comparisons: newComparisons(state)}
	l.leases.index = state.Index
	l.tables.New = func() any {
		return &table{tables: &l.tables, types: &l.times, registry: registry, decodes: make(map[engine.Target]int32), lookup: lookup{index: state.Index}}
	}
	l.SetDecider(d)
	return l
}

// SetDecider replaces the Decider for later placements.
func (l *Local) SetDecider(d Decider) { l.decider.Store(&d) }

// Open returns the number of leases that are not released.
func (l *Local) Open() int { return int(l.leases.open.Load()) }

// LiveIDs returns the number of disagg ids in flight.
func (l *Local) LiveIDs() int { return l.leases.live.Len() }

// Ready reports whether one request could be placed now, and every engine known at the start has
// been looked at.
func (l *Local) Ready() bool { return l.registry.Settled() && l.registry.Snapshot().Ready() }

// Needs implements Coordinator.
func (l *Local) Needs() abi.Needs { return (*l.decider.Load()).Needs() }

// Headers implements Coordinator.
func (l *Local) Headers() []string { return (*l.decider.Load()).Headers() }

// Place decides and commits a placement. In steady state it allocates only the placement,
// if placements are recycled.
//
// Targets with an open circuit, and excluded targets, are candidates only if the phase
// has no other targets: a request to an engine that failed before may succeed. The
// exception is decode with an open circuit: prefill would compute and hold KV that no
// decode reads.
func (l *Local) Place(ctx context.Context, a *PlacementRequest) (*Placement, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	snapshot := l.registry.Snapshot()
	pool, err := resolve(snapshot, a.Model)
	if err != nil {
		return nil, err
	}
	d, now := *l.decider.Load(), time.Now()
	only := a.Only.Decode.Instance != nil
	needs := d.Needs()
	if only {
		needs = 0
	}
	t := l.tables.Get().(*table)
	t.reset(pool, a, needs, now)
	if needs&(abi.NeedConversation|abi.NeedBlocks) != 0 {
		l.recall(snapshot, pool, a, t)
	}
	g := &committed{lease: Lease{of: &l.leases}}
	var chosen abi.PlaceDecision
	if only && a.Prefill.Instance == nil {
		chosen, err = t.claimOnly(pool, a, now)
	} else {
		chosen, err = l.decide(ctx, d, snapshot, pool, a, t, g, now)
	}
	if err == nil {
		err = l.commit(ctx, d, a, t, g, chosen, now)
	}
	g.Facts, g.Targets, g.Lease, g.table = t.place, t.targets, &g.lease, t
	if err != nil {
		for _, f := range g.Fallbacks {
			l.observer.Fallback(f.What, f.Reason)
		}
		g.Recycle()
		var none *NoTargetError
		if errors.As(err, &none) {
			l.wake(pool, a, none.Phase)
		}
		return nil, err
	}
	return &g.Placement, nil
}

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
func (l *Local) recall(s *engine.Snapshot, pool *engine.Pool, a *PlacementRequest, t *table) {
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
		t.match(a.Key.Chains)
		if first {
			t.place.Request.Shared = l.sequences.of(pool, s).begun.Add(t.beginning())
		}
	}
}

// decide lists the candidates for one leg or for two, and chooses among them.
func (l *Local) decide(ctx context.Context, d Decider, s *engine.Snapshot, pool *engine.Pool, a *PlacementRequest, t *table, g *committed, now time.Time) (chosen abi.PlaceDecision, err error) {
	fixed := a.Prefill.Instance != nil
	two := fixed || a.Two && a.Aggregate == 0 && !a.Request.PairBroken
	if !two && a.Aggregate == 0 && !a.Request.PairBroken {
		if two, err = l.plan(ctx, d, pool, a, t, g, now); err != nil {
			return chosen, err
		}
	}
	switch {
	case !two:
		if t.fillAggregated(pool, a, now); len(t.targets) == 0 {
			return chosen, &NoTargetError{Model: a.Model}
		}
	case fixed:
		if !t.fillFixed(pool, a, now) {
			return chosen, &NoTargetError{Phase: fixedLacks(pool, a), Model: a.Model}
		}
	default:
		if missing, ok := t.fillPairs(pool, a, now); !ok {
			return chosen, &NoTargetError{Phase: missing, Model: a.Model}
		}
	}
	if a.Same.Decode.Instance != nil {
		t.keepSame(a)
	}
	if two && t.needs&abi.NeedPairs != 0 {
		t.fillStates()
	}
	t.place.Sequence = l.sequences.of(pool, s).next(a, two)
	t.place.Random = rand.Uint64()
	if chosen = l.choose(ctx, d, t, g, now); chosen.Decode < 0 {
		return chosen, &NoTargetError{Phase: abi.Decode, Model: a.Model}
	}
	return chosen, nil
}

// plan calls the plan policy, which decides the number of legs.
func (l *Local) plan(ctx context.Context, d Decider, pool *engine.Pool, a *PlacementRequest, t *table, g *committed, now time.Time) (two bool, err error) {
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
	case answer.Decision > abi.PlanHold,
		answer.Status != 0 && (answer.Decision != abi.PlanReject || answer.Status < 400 || answer.Status > 599):
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

// choose returns the rows for the legs: the policy's answer if it follows the contract,
// otherwise the native rule's. Rows whose pair or trial another request has claimed are
// replaced.
func (l *Local) choose(ctx context.Context, d Decider, t *table, g *committed, now time.Time) abi.PlaceDecision {
	chosen, policy, ok := d.Place(ctx, &t.place)
	g.Notes = append(g.Notes, t.place.Notes...)
	g.Policy = policy
	switch {
	case !ok:
		g.fallback("place", policy)
	case !t.place.Allows(chosen):
		g.fallback("place", ReasonNonsense)
		ok = false
	}
	if !ok {
		g.Policy, t.place.Scored, t.place.Scale, t.place.Scores = native, false, 0, t.place.Scores[:0]
		if chosen, _, ok = l.fallback.Place(ctx, &t.place); !ok || !t.place.Allows(chosen) {
			chosen = t.leastLoad()
		}
	}
	if t.trials || l.registry.PairsInTrouble() {
		chosen = t.settle(&g.Placement, chosen, now)
	}
	return chosen
}

// commit mints the id unless it is kept, takes the loads and records the conversation. It
// changes nothing if there is no id.
func (l *Local) commit(ctx context.Context, d Decider, a *PlacementRequest, t *table, g *committed, chosen abi.PlaceDecision, now time.Time) error {
	g.Decode, g.Flow = t.targets[chosen.Decode], abi.FlowAggregated
	computer, row := g.Decode, chosen.Decode // of the prompt
	if chosen.Prefill >= 0 {
		g.Prefill = t.targets[chosen.Prefill]
		g.Flow = g.Prefill.Flow
		computer, row = g.Prefill, chosen.Prefill
		if g.ID = a.ID; g.ID != 0 {
			l.leases.live.Hold(g.ID)
		} else if g.ID = l.mintID(ctx, d, t, g); g.ID == 0 {
			return ErrNoID
		}
		g.lease.id = g.ID
	}
	t.place.Flow = g.Flow
	prompt := a.Request.PromptTokens
	charge := Charge{Prompt: prompt, Queued: -1, Tokens: prompt + expected(&a.Request)}
	if a.Prefill.Instance == nil {
		charge.Queued = max(0, prompt-t.place.Candidates[row].Matched())
		computer.Load[computer.Rank].Placed(charge.Queued, now)
		if len(a.Key.Media) != 0 {
			computer.Media[computer.Rank].Sent(a.Key.Media)
		}
		if t.needs&abi.NeedPredictions != 0 {
			g.lease.times = t.measure(prompt, chosen, &g.Placement, now)
		}
	}
	g.lease.carry(g.Prefill, g.Decode, charge, now)
	l.leases.open.Add(1)
	if g.Matched = -1; len(t.matched) != 0 {
		g.lease.expected, g.Matched = t.expect(g.Prefill, g.Decode, a.Prefill.Instance != nil, now)
	}
	if a.Lookup.Done && l.state.Conversations != nil {
		l.state.Conversations.Record(a.Lookup.Turn, homeOf(computer), homeOf(g.Decode), now)
		g.Turn = a.Lookup.Turn
	}
	return nil
}

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
	case !l.leases.live.Add(id):
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
		if id = disaggid.Pack(facts); l.leases.live.Add(id) {
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
	maxSequences = 128
)

// expected returns how many tokens decode is expected to produce for a request.
func expected(r *abi.RequestFacts) int64 {
	tokens := r.MaxTokens
	if tokens < 0 {
		tokens = usualAnswer
	}
	return min(tokens, longAnswer) * max(1, min(r.N, maxSequences))
}
