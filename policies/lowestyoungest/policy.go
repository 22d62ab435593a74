// Package lowestyoungest is the built-in evict policy lowest_youngest: it ends a running request of
// the lowest class. It is a pure function of the facts.
package lowestyoungest

import "github.com/pdproxy/pdproxy/abi"

// Evict returns the row with the lowest priority. Of several, it returns the one that got its place
// last: the engines have done the least work for it.
func Evict(f *abi.EvictFacts) int32 {
	best := int32(abi.EvictNone)
	for i := range f.Running {
		r := &f.Running[i]
		if best < 0 || r.Priority < f.Running[best].Priority || r.Priority == f.Running[best].Priority && r.AgeMicros < f.Running[best].AgeMicros {
			best = int32(i)
		}
	}
	return best
}
