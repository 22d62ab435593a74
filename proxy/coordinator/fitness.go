package coordinator

import "github.com/pdproxy/pdproxy/abi"

// sift keeps, of the rows of one group (those from row from on), the fittest rows of each
// phase that can form a pair. It returns the fitness of the less fit phase. If no pair is
// possible, it removes all rows and returns worst+1.
func (t *table) sift(from int) uint8 {
	var prefill, decode [worst + 1]holders // indexed by fitness: the rows that are at least this fit
	for i := from; i < len(t.fitness); i++ {
		c := &t.place.Candidates[i]
		for f := t.fitness[i]; f <= worst; f++ {
			prefill[f].add(c, abi.RolePrefill)
			decode[f].add(c, abi.RoleDecode)
		}
	}
	for level := fit; level <= worst; level++ {
		for other := fit; other <= level; other++ {
			if pairable(prefill[level], decode[other]) {
				t.keep(from, level, other, prefill[level], decode[other])
				return level
			}
			if pairable(prefill[other], decode[level]) {
				t.keep(from, other, level, prefill[other], decode[level])
				return level
			}
		}
	}
	t.truncate(from)
	return worst + 1
}

// keep removes rows that are less fit than their phase requires. It also removes each role
// of a row for which the other phase exists only on the same instance.
func (t *table) keep(from int, prefillFit, decodeFit uint8, prefill, decode holders) {
	n := from
	for i := from; i < len(t.fitness); i++ {
		c := &t.place.Candidates[i]
		if t.fitness[i] > prefillFit || !decode.besides(c) {
			c.Roles &^= abi.RolePrefill
		}
		if t.fitness[i] > decodeFit || !prefill.besides(c) {
			c.Roles &^= abi.RoleDecode
		}
		if c.Roles != 0 {
			t.move(n, i)
			n++
		}
	}
	t.truncate(n)
}

// holders tells whether no, one or several instances serve a phase.
type holders struct {
	first        uint32
	any, several bool
}

func (h *holders) add(c *abi.Candidate, phase abi.Role) {
	switch {
	case c.Roles&phase == 0:
	case !h.any:
		h.first, h.any = c.Instance, true
	case h.first != c.Instance:
		h.several = true
	}
}

// besides reports whether an instance other than c's serves the phase.
func (h *holders) besides(c *abi.Candidate) bool {
	return h.several || h.any && h.first != c.Instance
}

// pairable reports whether prefill and decode can use two different instances.
func pairable(prefill, decode holders) bool {
	return prefill.any && decode.any && (prefill.several || decode.several || prefill.first != decode.first)
}
