package meter

// flow is the state at a place of the code of two searches of the engine's compiler. In each block it
// looks for the last value of a variable in the blocks before, one after the other, up to a block
// with several predecessors (ssa/builder.go, findValue). And at the end of each block it keeps a list
// of all addresses whose bounds the code has checked (frontend/frontend.go, knownSafeBounds).
type flow struct {
	dead  bool
	chain int // blocks since the last one that has several predecessors for sure
	known int // checked addresses, at most
}

// joint is what is known of the branches to the end of a block.
type joint struct {
	preds  int // without those of br_table, which may have another label
	all    int // with all labels of br_table
	chain  int // of a branch, at most
	known  int // at the branch with the least; only if preds > 0
	tables int // known at a br_table that may have this label, at most; -1: none
}

// enter counts the end of a basic block, of which the next one is a successor.
func (s *measure) enter() {
	if !s.dead {
		s.chain++
		s.bounds += s.known
	}
}

// find counts the search for a variable, or of several.
func (s *measure) find(variables int) { s.lookups += variables * (s.chain + 1) }

// leave counts a branch to the end of a block. The block there may search each variable, twice.
func (s *measure) leave(b *frame) {
	if s.dead {
		return
	}
	s.find(2 * s.locals)
	b.joint.all++
	if b.loop {
		return
	}
	if b.joint.preds == 0 || s.known < b.joint.known {
		b.joint.known = s.known
	}
	b.joint.preds++
	b.joint.chain = max(b.joint.chain, s.chain)
}

// leaveTable counts the branches of br_table to labels of which the outermost is known.
func (s *measure) leaveTable(in instruction) {
	if s.dead {
		return
	}
	s.find(2 * s.locals * in.targets)
	s.bounds += s.known
	for i := len(s.blocks) - 1; i >= 0 && i >= len(s.blocks)-1-int(in.index); i-- {
		j := &s.blocks[i].joint
		if j.all++; i == 0 || i == len(s.blocks)-1-int(in.index) {
			j.all += in.targets // the outermost one merges most values
		}
		j.chain, j.tables = max(j.chain, s.chain+1), max(j.tables, s.known)
	}
}

// arrive sets the state behind the end of a block.
func (s *measure) arrive(b *frame) {
	values := min(s.locals, s.sets-b.sets) + b.params + b.results
	s.phis += (b.joint.all + 1) * values * values
	j := b.joint
	if b.loop { // which has one predecessor if no branch goes back to it
		s.chain += b.flow.chain
		return
	}
	if !s.dead {
		s.leave(b)
		j = b.joint
	}
	next := flow{chain: j.chain, known: j.known}
	switch {
	case j.preds == 0 && j.tables < 0:
		next.dead = true
	case j.preds == 0:
		next.known = j.tables
	case j.preds > 1:
		next.chain = 0
	}
	if b.half {
		next.known = 0 // the compiler has no list for the else that it adds
	}
	s.bounds += s.known
	s.flow = next
}
