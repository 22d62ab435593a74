// Package candidates is what the place policies share: which rows of the table
// suit a leg, which of two carries less, and random bits from a counter.
package candidates

import "github.com/pdproxy/pdproxy/abi"

// Grade says how well row i suits the leg of role: 0 not at all, then better
// with another instance than prefill's (a transfer inside one instance is the
// last resort), then better unless its circuit is half open and its trial
// request is under way. prefill is the row that a decode leg pairs with, or -1.
func Grade(rows []abi.Candidate, i int32, role abi.Role, prefill int32) int {
	c := &rows[i]
	if c.Roles&role == 0 || i == prefill {
		return 0
	}
	g := 1
	if prefill < 0 {
		g += 2
	} else if p := &rows[prefill]; c.Group != p.Group {
		return 0
	} else if c.Instance != p.Instance {
		g += 2
	}
	if !c.Trial || c.Requests == 0 {
		g++
	}
	return g
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
