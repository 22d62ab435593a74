package kvevents

import "github.com/pdproxy/pdproxy/proxy/state/kvindex"

// feed takes the events of one target; *kvindex.Feed is one.
type feed interface {
	Stored(e *kvindex.Stored)
	Removed(tier kvindex.Tier, hashes []uint64)
	Moved(from, to kvindex.Tier, hashes []uint64)
	Cleared()
}

// noGroup is the id of events that name no group.
const noGroup = ^uint64(0)

// group is one of the caches that an engine keeps side by side for a model with
// several kinds of attention. A prefix counts as held if the layers that need
// all of it have it, so the group with the highest merit is the one to know; of
// equals that with the lowest id.
type group struct {
	id    uint64
	merit uint32
}

// sieve chooses which of an engine's block events count: those of one group,
// and of the one block length that prompts are cut by. The zero value has yet
// to learn both.
type sieve struct {
	best    group
	elected bool
	block   int  // tokens of a block; 0 not known yet
	fixed   bool // block was given, not learned
}

// elect reports whether blocks stored in the group count. turned says that
// they replace those of another group that counted so far.
func (s *sieve) elect(g group) (counts, turned bool) {
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

// counts reports whether the group is the one whose blocks count. An event that
// takes blocks away may not tell the merit.
func (s *sieve) counts(id uint64) bool {
	return id == noGroup || !s.elected || id == s.best.id
}

// measure reports whether stored blocks of n tokens count. Shorter ones than
// those seen on the GPU are the partial last block of a prompt, others are the
// chunks of some store below it. turned says that n replaces a shorter length
// that counted so far.
func (s *sieve) measure(n int, tier kvindex.Tier) (counts, turned bool) {
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

// admit is elect and measure for one event; what turned over is cleared.
func (s *sieve) admit(g group, e *kvindex.Stored, to feed) bool {
	ours, turned := s.elect(g)
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
