package kvevents

import "github.com/pdproxy/pdproxy/proxy/state/kvindex"

// feed receives the events of one target; *kvindex.Feed implements it.
type feed interface {
	Stored(e *kvindex.Stored) (applied, refused int)
	Removed(tier kvindex.Tier, hashes []uint64)
	Moved(from, to kvindex.Tier, hashes []uint64) (refused int)
	Cleared()
}

// noGroup is the group id of events without a group.
const noGroup = ^uint64(0)

// group is one of the caches that an engine keeps for a model with several kinds of
// attention. A prefix counts as held if the layers that need all of it have it. So the
// group with the highest merit counts. If several groups have that merit, the group with
// the lowest id counts.
type group struct {
	id    uint64
	merit uint32
}

// eventFilter selects the block events that count. These are the events of one group,
// with the block length by which prompts are cut. The zero value learns the group and the
// length from the events.
type eventFilter struct {
	best    group
	elected bool
	block   int  // tokens of a block; 0 unknown
	fixed   bool // block was configured, not learned
}

// choose reports whether blocks stored in the group count. turned: these blocks replace
// the blocks of another group that counted until now.
func (s *eventFilter) choose(g group) (counts, turned bool) {
	switch {
	case g.id == noGroup:
		return true, false
	case s.elected && g.id == s.best.id:
		s.best.merit = max(s.best.merit, g.merit)
		return true, false
	case s.elected && (g.merit < s.best.merit || g.merit == s.best.merit && g.id > s.best.id):
		return false, false
	}
	turned = s.elected
	s.best, s.elected = g, true
	return true, turned
}

// counts reports whether the group's blocks count. It is used for events that remove
// blocks, which may not contain the merit.
func (s *eventFilter) counts(id uint64) bool {
	return id == noGroup || !s.elected || id == s.best.id
}

// measure reports whether stored blocks of n tokens count. Blocks shorter than those on
// the GPU are the partial last block of a prompt; others are chunks of a store below it.
// turned: n replaces a shorter length that counted until now.
func (s *eventFilter) measure(n int, tier kvindex.Tier) (counts, turned bool) {
	if n == s.block {
		return n > 0, false
	}
	if s.fixed || n < s.block || tier != kvindex.GPU {
		return false, false
	}
	turned = s.block > 0
	s.block = n
	return true, turned
}

// admit applies choose and measure to one event, and clears the feed if either turned.
func (s *eventFilter) admit(g group, e *kvindex.Stored, to feed) bool {
	ours, turned := s.choose(g)
	if !ours {
		return false
	}
	if turned {
		to.Cleared()
	}
	if len(e.Tokens) == 0 {
		return true
	}
	if ours, turned = s.measure(e.BlockTokens, e.Tier); turned {
		to.Cleared()
	}
	return ours
}
