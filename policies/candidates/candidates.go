// Package candidates is what the place policies share: which rows of the table
// suit a leg, which of two carries less, and random bits for each row.
package candidates

import "github.com/pdproxy/pdproxy/abi"

// Leg is one leg that is to be placed, as the rows are judged for it. It has few
// enough fields for the compiler to keep it in registers.
type Leg struct {
	roles    abi.Role
	group    uint64 // the prefill target's in the low half, which of its bits count in the high
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
	const all = 1<<32 - 1
	return Leg{roles: abi.RoleDecode, group: uint64(p.Group) | all<<32, instance: uint64(p.Instance), prefill: int(prefill)}
}

// Suits reports whether row i, which is c, can take the leg. This and Grade are
// small enough to be inlined, for a call costs a guest built by Go more than
// they do; and what is common goes straight on, for so does each jump.
func (l Leg) Suits(c *abi.Candidate, i int) bool {
	return c.Roles&l.roles != 0 && (c.Group^uint32(l.group))&uint32(l.group>>32) == 0 && i != l.prefill
}

// BestGrade is the highest grade of a row.
const BestGrade = 4

// Grade says how well a row suits the leg that it can take: better with another
// instance than prefill's (a transfer inside one instance is the last resort),
// then better unless its circuit is half open and its trial request is under
// way. It is 1 to 4.
func (l Leg) Grade(c *abi.Candidate) int {
	g := BestGrade
	if uint64(c.Instance) == l.instance {
		g = BestGrade - 2
	}
	trial, busy := 0, 0 // two selections and no jump
	if c.Trial {
		trial = 1
	}
	if c.Requests != 0 {
		busy = 1
	}
	return g - trial&busy
}

// Lighter reports whether a carries less than b: fewer tokens, then fewer
// requests.
func Lighter(a, b *abi.Candidate) bool {
	if a.Tokens != b.Tokens {
		return a.Tokens < b.Tokens
	}
	return a.Requests < b.Requests
}

// Draw gives 32 random bits to each row of one decision, whose random number
// all of them share. It is the first half of the generator SplitMix64 (Steele,
// Lea, Flood: Fast splittable pseudorandom number generators, 2014).
func Draw(random uint64, row int) uint64 {
	x := random + uint64(row)*0x9e3779b97f4a7c15
	return (x ^ x>>30) * 0xbf58476d1ce4e5b9 >> 32
}
