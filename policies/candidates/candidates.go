// Package candidates is what the place policies share: which rows of the table
// suit a leg, which of two carries less, and random bits from a number.
package candidates

import "github.com/pdproxy/pdproxy/abi"

// Leg is one leg that is to be placed, as the rows are judged for it.
type Leg struct {
	roles    abi.Role
	group    uint32 // the prefill target's,
	bound    uint32 // of which these bits count: all or, without one, none
	instance uint64 // the prefill target's; without one, a number that none has
	prefill  int    // the row that a decode leg pairs with, or -1
}

// Aggregated is the leg of an aggregated request: any row can take it.
func Aggregated() Leg { return Leg{roles: abi.RoleBoth, instance: 1 << 32, prefill: -1} }

// Prefill is the prefill leg of a pair.
func Prefill() Leg { return Leg{roles: abi.RolePrefill, instance: 1 << 32, prefill: -1} }

// Decode is the decode leg that pairs with a row.
func Decode(rows []abi.Candidate, prefill int32) Leg {
	p := &rows[prefill]
	return Leg{roles: abi.RoleDecode, group: p.Group, bound: 1<<32 - 1, instance: uint64(p.Instance), prefill: int(prefill)}
}

// Grade says how well row i, which is c, suits the leg: 0 not at all, then
// better with another instance than prefill's (a transfer inside one instance is
// the last resort), then better unless its circuit is half open and its trial
// request is under way. The compiler inlines it: a call costs a guest more than
// the grade does.
func (l *Leg) Grade(c *abi.Candidate, i int) (g int) {
	if c.Roles&l.roles == 0 || (c.Group^l.group)&l.bound != 0 || i == l.prefill {
		return 0
	}
	g = 2
	if c.Trial && c.Requests != 0 {
		g = 1
	}
	if uint64(c.Instance) != l.instance {
		g += 2
	}
	return g
}

// Best returns the highest grade among the rows, 0 when none suits the leg, and
// how many rows have it.
func (l *Leg) Best(rows []abi.Candidate) (grade int, n uint64) {
	for i := range rows {
		switch g := l.Grade(&rows[i], i); {
		case g > grade:
			grade, n = g, 1
		case g == grade:
			n++
		}
	}
	return grade, n
}

// Lighter reports whether a carries less than b: fewer tokens, then fewer
// requests.
func Lighter(a, b *abi.Candidate) bool {
	if a.Tokens != b.Tokens {
		return a.Tokens < b.Tokens
	}
	return a.Requests < b.Requests
}

// Bits gives 64 random bits for the n-th draw: the generator SplitMix64 (Steele,
// Lea, Flood: Fast splittable pseudorandom number generators, 2014),
// equidistributed over n.
func Bits(seed, n uint64) uint64 {
	x := seed + n*0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
