package coordinator

import (
	"maps"
	"sync"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// turns counts the placements of one model, each shape of legs apart: what is
// counted together must be drawn from the same targets, else a policy that takes
// turns would strand some of them whenever two shapes, or two models, come
// alternately.
type turns struct{ first, later shapes }

// shapes counts the placements of each shape of legs.
type shapes struct {
	aggregated [abi.RoleBoth + 1]atomic.Uint64 // by Ask.Aggregate
	pair       atomic.Uint64
	fixed      atomic.Uint64    // decode alone, to a prefill target that stays
	reserved   [2]atomic.Uint64 // one phase alone: prefill, decode
}

// next returns how many placements of the shape there were before this one. The
// first turns of conversations are counted apart: a policy that sends the later
// ones home would else leave out some targets when it deals out the first.
func (c *turns) next(a *Ask, two bool) uint64 {
	s := &c.later
	if a.turn.Number == 1 {
		s = &c.first
	}
	counter := &s.pair
	switch {
	case !two:
		counter = &s.aggregated[a.Aggregate&abi.RoleBoth]
	case !a.Prefill.IsZero():
		counter = &s.fixed
	}
	return counter.Add(1) - 1
}

// reserve is next for a placement of one phase alone.
func (c *turns) reserve(a *Ask, phase abi.Phase) uint64 {
	s := &c.later
	if a.turn.Number == 1 {
		s = &c.first
	}
	counter := &s.reserved[0]
	if phase == abi.Decode {
		counter = &s.reserved[1]
	}
	return counter.Add(1) - 1
}

// turnTable holds the turns of each model. Safe for concurrent use.
type turnTable struct {
	models atomic.Pointer[map[string]*turns] // never changed, but replaced
	mu     sync.Mutex                        // of replacing
}

// of returns the turns of a pool's model. They stay the same as long as some
// instance is known to serve it.
func (t *turnTable) of(p *engine.Pool, s *engine.Snapshot) *turns {
	if models := t.models.Load(); models != nil {
		if c, ok := (*models)[p.Model]; ok {
			return c
		}
	}
	return t.add(p, s)
}

// add makes turns for the model and drops those of models that s lacks.
func (t *turnTable) add(p *engine.Pool, s *engine.Snapshot) *turns {
	t.mu.Lock()
	defer t.mu.Unlock()
	next := map[string]*turns{}
	if models := t.models.Load(); models != nil {
		if c, ok := (*models)[p.Model]; ok {
			return c
		}
		maps.Copy(next, *models)
	}
	maps.DeleteFunc(next, func(model string, _ *turns) bool {
		_, known := s.Pool(model)
		return !known
	})
	c := &turns{}
	next[p.Model] = c
	t.models.Store(&next)
	return c
}
