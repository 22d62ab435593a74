// Package pairaware is the built-in place policy pair_aware: it chooses prefill
// and decode together, by the sum of their costs and of the cost of their
// connection.
package pairaware

import (
	"math"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
	"github.com/pdproxy/pdproxy/policies/kvaware"
	"github.com/pdproxy/pdproxy/policies/param"
)

// Params are the parameters for operators: those of kv_aware, and the costs of
// pairs.
type Params struct {
	KV                           kvaware.Params
	UnknownMicros, WarmingMicros float64
}

// Needs returns the additional facts that the policy needs with these parameters.
func (p *Params) Needs() abi.Needs { return p.KV.Needs() | abi.NeedPairs }

// Table describes the parameters; it points into p.
func (p *Params) Table() param.Table {
	const large = 1e9
	return append(p.KV.Table(),
		param.Param{Name: "unknown_micros", Value: &p.UnknownMicros, Default: 50_000, Most: large, Unit: "µs", Meaning: "cost of a pair that is not connected yet"},
		param.Param{Name: "warming_micros", Value: &p.WarmingMicros, Default: 200_000, Most: large, Unit: "µs", Meaning: "cost of a pair that is connecting"},
	)
}

// Defaults returns the parameters with their default values.
func Defaults() Params {
	var p Params
	p.Table().Reset()
	return p
}

// broken is the cost of a broken pair in µs: more than any estimate, and less
// than a step of a row's grade.
const broken = 1e14

// Place is the policy, a pure function of the facts that does not allocate. It reads p, which must
// not change during the call. An index of -1 for a leg means that no candidate fits. It stores its
// estimates in seconds in the scores; less is better. The score of a prefill row is the estimate of
// the prefill alone. The score of any other row is the estimate of its cheapest pair.
func (p *Params) Place(f *abi.PlaceFacts) abi.PlaceDecision {
	if f.Flow == abi.FlowAggregated {
		return p.KV.Place(f)
	}
	f.Scored, f.Scale = true, abi.LowWins|abi.UnitSeconds
	s := search{p: p, f: f, affine: p.KV.Affine(f), best: abi.PlaceDecision{Prefill: f.Fixed, Decode: -1}, least: math.MaxFloat64, floor: math.MaxFloat64}
	s.pairs()
	if f.Fixed >= 0 {
		s.pair(f.Fixed, 0)
		f.Candidates[f.Fixed].Score = 0
		return s.best
	}
	leg := candidates.Prefill()
	pool := p.KV.Survey(f, abi.RolePrefill)
	prefill, second := p.KV.Prefill(f, abi.RolePrefill, &pool, 0)
	if f.Adapters {
		prefill, second = p.KV.AffinePrefill(f)
	}
	if prefill < 0 {
		return s.best
	}
	s.best.Prefill = prefill
	s.pair(prefill, cost(&f.Candidates[prefill], leg))
	if second+s.floor < s.least {
		s.others(leg, prefill)
	}
	return s.best
}

// search is the state of the search for the cheapest pair.
type search struct {
	p      *Params
	f      *abi.PlaceFacts
	affine bool // the costs of LoRA adapters or of labels apply
	best   abi.PlaceDecision
	least  float64 // the cost of best in µs

	// The lowest costs of a token's transfer, of a pair's state, and of decode
	// together with the pair.
	transfer, state, floor float64
}

// pairs finds the lower bounds of the costs of pairs.
func (s *search) pairs() {
	s.transfer, s.state = s.p.KV.TransferMicros, s.p.UnknownMicros
	for i := range s.f.Pairs {
		pair := &s.f.Pairs[i]
		if pair.TransferMicros > 0 {
			s.transfer = min(s.transfer, float64(pair.TransferMicros))
		}
		s.state = min(s.state, s.p.state(pair.State))
	}
}

// cost returns the cost of a prefill row in µs, from its score.
func cost(c *abi.Candidate, leg candidates.Leg) float64 {
	return float64(float64(c.Score)*1e6) + kvaware.Busy*float64(candidates.BestGrade-leg.Grade(c))
}

// tries is the number of prefill rows that are combined with all decode rows,
// if that finds a pair that is not broken.
const tries = 8

// others tries the prefill rows after the first, the cheapest first. It stops at the first row that
// cannot improve on the best pair, which is usually among the first rows.
func (s *search) others(leg candidates.Leg, first int32) {
	rows := s.f.Candidates
	var tried [listed / 64]uint64
	row := first
	for n := 1; n < tries || s.least >= broken; n++ {
		if row < listed {
			tried[row/64] |= 1 << (row % 64)
		}
		row = -1
		least := math.MaxFloat64
		for i := range rows[:min(len(rows), listed)] {
			c := &rows[i]
			if !leg.Suits(c, i) || tried[i/64]&(1<<(i%64)) != 0 {
				continue
			}
			if v := cost(c, leg); v < least || v == least && kvaware.Before(rows, int32(i), row, s.f.Random) {
				row, least = int32(i), v
			}
		}
		if row < 0 || s.best.Decode >= 0 && least+s.floor >= s.least {
			return
		}
		s.pair(row, least)
	}
}

// listed is the number of rows whose pairs are known, and that are tried.
const listed = 512

// pair combines a prefill row of the given cost with each decode row. Pairs
// that the table of pairs does not list count as unknown. The first call also
// finds the floor.
func (s *search) pair(prefill int32, cost float64) {
	rows, kv, first := s.f.Candidates, &s.p.KV, s.floor == math.MaxFloat64
	leg := candidates.Decode(rows, prefill)
	var known [listed / 64]uint64
	for i := range s.f.Pairs {
		if pair := &s.f.Pairs[i]; pair.Prefill == prefill && uint32(pair.Decode) < listed {
			known[pair.Decode/64] |= 1 << (pair.Decode % 64)
		}
	}
	prompt, pressure, floor := s.f.Request.PromptTokens, kv.Pressure(), s.floor
	for i := range rows {
		c := &rows[i]
		if c.Roles&abi.RoleDecode == 0 {
			continue
		}
		stream, missing := kv.Stream(c, pressure), kvaware.Missing(c, prompt)
		if first {
			if v := stream + float64(s.transfer*missing); v < floor {
				floor = v
			}
			if c.Roles&abi.RolePrefill == 0 {
				c.Score = math.MaxFloat32
			}
		}
		if !leg.Suits(c, i) || i < listed && known[i/64]&(1<<(i%64)) != 0 {
			continue
		}
		v := cost + stream + float64(kv.TransferMicros*missing) + s.p.UnknownMicros
		if s.affine {
			s.offer(leg, prefill, int32(i), v)
			continue
		}
		if score := float32(v * 1e-6); score < c.Score && c.Roles&abi.RolePrefill == 0 {
			c.Score = score
		}
		if v <= s.least {
			s.keep(leg, prefill, int32(i), v)
		}
	}
	if first {
		s.floor = floor + s.state
	}
	for i := range s.f.Pairs {
		pair := &s.f.Pairs[i]
		if pair.Prefill != prefill || uint32(pair.Decode) >= uint32(min(len(rows), listed)) || !leg.Suits(&rows[pair.Decode], int(pair.Decode)) {
			continue
		}
		c, micros := &rows[pair.Decode], kv.TransferMicros
		if pair.TransferMicros > 0 {
			micros = float64(pair.TransferMicros)
		}
		v := cost + kv.Stream(c, pressure) + float64(micros*kvaware.Missing(c, prompt)) + s.p.state(pair.State)
		s.offer(leg, prefill, pair.Decode, v)
	}
}

// offer makes a pair the best pair, and its cost the score of its decode row, if the pair costs
// less. v is the cost without that of the LoRA adapter and of the labels, which offer adds. The
// loop over all rows does the same itself if these do not apply, because a call is slow in Wasm.
func (s *search) offer(leg candidates.Leg, prefill, decode int32, v float64) {
	if s.affine {
		v += s.p.KV.Apart(s.f, prefill, decode)
	}
	c := &s.f.Candidates[decode]
	if score := float32(v * 1e-6); score < c.Score && c.Roles&abi.RolePrefill == 0 {
		c.Score = score
	}
	if v <= s.least {
		s.keep(leg, prefill, decode, v)
	}
}

// keep stores a pair of the given cost if no stored pair costs less.
func (s *search) keep(leg candidates.Leg, prefill, decode int32, v float64) {
	rows := s.f.Candidates
	v += kvaware.Busy * float64(candidates.BestGrade-leg.Grade(&rows[decode]))
	if v < s.least || v == s.least && kvaware.Before(rows, decode, s.best.Decode, ^s.f.Random) {
		s.best, s.least = abi.PlaceDecision{Prefill: prefill, Decode: decode}, v
	}
}

func (p *Params) state(s abi.PairState) float64 {
	switch s {
	case abi.PairReady:
		return 0
	case abi.PairWarming:
		return p.WarmingMicros
	case abi.PairBroken:
		return broken
	}
	return p.UnknownMicros
}
