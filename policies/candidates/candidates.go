// Package candidates holds the code that the place policies share: which rows
// of the table suit a leg, which of two rows has less load, and random bits for
// each row.
package candidates

import "github.com/pdproxy/pdproxy/abi"

// Leg is a leg to place, with the conditions for its row. It has few fields, so
// that the compiler can keep it in registers.
type Leg struct {
	roles    abi.Role
	group    uint64 // low half: the prefill target's group; high half: a mask of its bits that count
	instance uint64 // instance of the prefill target; without a prefill target, a number that no instance has
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

// Suits reports whether row i, which is c, can take the leg. Suits and Grade
// are small enough to be inlined, because in a guest built by Go a call costs
// more than their work. The common case has no jump, because each jump is
// expensive there, too.
func (l Leg) Suits(c *abi.Candidate, i int) bool {
	return c.Roles&l.roles != 0 && (c.Group^uint32(l.group))&uint32(l.group>>32) == 0 && i != l.prefill
}

// BestGrade is the highest grade that Grade returns.
const BestGrade = 4

// Grade rates how well a row suits a leg that it can take, from 1 to 4. An instance other than
// prefill's is better, because a transfer inside one instance is the last resort. Next, a row is
// worse if its circuit is half open and its trial request is running.
func (l Leg) Grade(c *abi.Candidate) int {
	g := BestGrade
	if uint64(c.Instance) == l.instance {
		g = BestGrade - 2
	}
	trial, busy := 0, 0 // two selections without a jump
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

// Draw returns 32 random bits for each row of one decision. All rows share the
// decision's random number. It is the first half of the generator SplitMix64
// (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
func Draw(random uint64, row int) uint64 {
	x := random + uint64(row)*0x9e3779b97f4a7c15
	return (x ^ x>>30) * 0xbf58476d1ce4e5b9 >> 32
}
