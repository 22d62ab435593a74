package coordinator

import (
	"maps"
	"sync"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
)

// sequence counts the placements of one model. Each shape of legs has its own count. A
// round-robin policy uses the count modulo the number of targets, so all placements with
// one count must have the same targets. If two alternating shapes shared a count, their
// requests would never reach some targets. For the same reason each model has its own
// sequence, and so have requests that may use only some instances (PlacementRequest.Within).
type sequence struct {
	turns
	begun   conversation.Begun
	subsets atomic.Pointer[[subsets]turns] // by a hash of the allowed instances; nil: no request was limited yet
}

// subsets is the number of counts for requests that may use only some instances. Two subsets
// of the same hash share a count.
const subsets = 64

// turns counts the placements of first turns of conversations apart from the others: a policy
// that sends later turns to the same targets as the turn before would otherwise skip targets
// among the first turns.
type turns struct{ first, later shapes }

// shapes counts the placements of each shape of legs.
type shapes struct {
	aggregated [abi.RoleBoth + 1]atomic.Uint64 // by PlacementRequest.Aggregate
	pair       atomic.Uint64
	fixed      atomic.Uint64    // decode alone: the prefill target is kept
	reserved   [2]atomic.Uint64 // one phase alone: prefill, decode
}

// next returns the number of earlier placements of this shape.
func (c *sequence) next(a *PlacementRequest, two bool) uint64 {
	fixed, w, t := a.Prefill.Instance != nil, &a.Within, &c.turns
	switch {
	case !two && w.Whole != nil:
		t = c.subset(w.Whole)
	case fixed && w.Decode != nil:
		t = c.subset(w.Decode)
	case two && !fixed && (w.Prefill != nil || w.Decode != nil):
		t = c.subset(w.Prefill, w.Decode)
	}
	s := &t.later
	if a.Lookup.Turn.Number == 1 {
		s = &t.first
	}
	counter := &s.pair
	if fixed {
		counter = &s.fixed
	} else if !two {
		counter = &s.aggregated[a.Aggregate&abi.RoleBoth]
	}
	return counter.Add(1) - 1
}

// reserve is next for a placement of one phase alone.
func (c *sequence) reserve(a *PlacementRequest, phase abi.Phase) uint64 {
	list, i := a.Within.Prefill, 0
	if phase == abi.Decode {
		list, i = a.Within.Decode, 1
	}
	t := c.subset(list)
	s := &t.later
	if a.Lookup.Turn.Number == 1 {
		s = &t.first
	}
	return s.reserved[i].Add(1) - 1
}

// subset returns the counts of placements on the instances of these lists; nil lists have all
// instances.
func (c *sequence) subset(lists ...[]*engine.Instance) *turns {
	hash := uint64(0)
	for phase, list := range lists {
		for _, i := range list {
			x := (uint64(i.ID)<<1 | uint64(phase)) * 0x9e3779b97f4a7c15
			hash += x ^ x>>32 // the order of the instances has no meaning
		}
	}
	if hash == 0 {
		return &c.turns
	}
	all := c.subsets.Load()
	if all == nil {
		c.subsets.CompareAndSwap(nil, new([subsets]turns))
		all = c.subsets.Load()
	}
	return &all[hash*0x9e3779b97f4a7c15>>58]
}

// sequenceTable holds the sequence of each model. Safe for concurrent use.
type sequenceTable struct {
	models atomic.Pointer[map[string]*sequence] // a map is replaced, never changed
	mu     sync.Mutex                           // held while a map is replaced
}

// of returns the sequence of a pool's model. The sequence stays the same as long as an
// instance is known to serve the model.
func (t *sequenceTable) of(p *engine.Pool, s *engine.Snapshot) *sequence {
	if models := t.models.Load(); models != nil {
		if c, ok := (*models)[p.Model]; ok {
			return c
		}
	}
	return t.add(p, s)
}

// add makes a sequence for the model, and drops the sequences of models that the snapshot
// s lacks.
func (t *sequenceTable) add(p *engine.Pool, s *engine.Snapshot) *sequence {
	t.mu.Lock()
	defer t.mu.Unlock()
	next := map[string]*sequence{}
	if models := t.models.Load(); models != nil {
		if c, ok := (*models)[p.Model]; ok {
			return c
		}
		maps.Copy(next, *models)
	}
	maps.DeleteFunc(next, func(model string, _ *sequence) bool {
		_, known := s.Pool(model)
		return !known
	})
	c := &sequence{}
	next[p.Model] = c
	t.models.Store(&next)
	return c
}
