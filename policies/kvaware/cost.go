package kvaware

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// Products are converted before they are added, here and wherever the costs are
// used: the conversion keeps a compiler from fusing the two, which rounds
// otherwise than WebAssembly does. All costs are in µs.

// Busy is what each step of a row's grade costs: more than any estimate.
const Busy = 1e15

// Pool is what the candidates of a leg have in common.
type Pool struct {
	prompt  float64
	micros  float64 // prefill of one uncached token, over all rows
	worth   float64 // of patience, for a saved token
	balance float64 // of a token placed on a row of late
	late    float64 // from here on waiting costs more
	spread  float64 // of being one row off the place for this size; 0: there is none
	place   float64 // for prompts of this size, counted in rows

	pressure float64 // of KV memory in use above the bound, for all of it
}

// enough is how many requests each row had of late, on average, when it is known
// what sizes prompts have.
const enough = 4

// Survey looks at all rows that suit the leg. It leaves in the score of each how
// many tokens' worth of prefill it saves, for Prefill.
func (p *Params) Survey(f *abi.PlaceFacts, leg candidates.Leg) Pool {
	rows := f.Candidates
	s := Pool{prompt: float64(max(1, f.Request.PromptTokens)), micros: p.TokenMicros, late: p.LateSeconds * 1e6, pressure: p.pressure()}
	n, best, micros, measured, queued, recent, requests := 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) {
			continue
		}
		n++
		if c.TokenMicros > 0 {
			micros += float64(c.TokenMicros)
			measured++
		}
		queued += float64(c.Queued)
		recent += float64(c.RecentTokens)
		requests += float64(c.RecentRequests)
		saved := 0.0
		switch {
		case c.BlockTokens == 0 || c.BlocksCPU|c.BlocksDisk != 0:
			saved = p.saved(c, s.prompt)
		case c.BlocksGPU != 0:
			saved = min(s.prompt, float64(float64(c.BlocksGPU)*float64(c.BlockTokens)))
		}
		c.Score = float32(saved)
		best = max(best, saved)
	}
	if measured > 0 {
		s.micros = micros / measured
	}
	typical := p.TypicalTokens
	if requests >= 1 {
		typical = max(1, recent/requests)
	}
	typical *= s.micros
	s.balance = p.BalanceWeight * s.micros
	if best <= p.SharedTokens {
		if requests < enough*n {
			return s
		}
		x := s.prompt * s.micros / (p.SizeMiddle * typical)
		s.place = n * x / (1 + x)
		s.spread = p.SizeSpread * typical / (n + float64(queued*s.micros)/typical)
		return s
	}
	holders := 0.0
	for i := range rows {
		if c := &rows[i]; leg.Suits(c, i) && float64(c.Score) >= 0.75*best {
			holders++
		}
	}
	patience := p.Patience
	if f.Request.Turn == 1 {
		patience = p.FirstPatience
	}
	s.worth = patience * typical / (s.prompt * max(1, holders))
	return s
}

// Prefill leaves in the score of each row that Survey has seen what the prompt
// costs there, in seconds, and returns the cheapest row; -1 without one. The cost
// is what waits there, what is not saved, what was placed there of late,
// pressure, inFlight for each token in flight, and how far the row is from the
// place for prompts of this size, less the patience that its blocks are worth.
func (p *Params) Prefill(f *abi.PlaceFacts, leg candidates.Leg, s *Pool, inFlight float64) int32 {
	rows, best, least, order := f.Candidates, int32(-1), 0.0, uint64(0)
	off := 0.5 - s.place // of the row from its place
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) {
			continue
		}
		micros := s.micros
		if own := float64(c.TokenMicros); own > 2*micros || own < 0.5*micros && own > 0 {
			micros = own
		}
		saved := float64(c.Score)
		cost := (s.prompt - saved + float64(p.QueueWeight*float64(c.Queued))) * micros
		if cost > s.late {
			cost += float64(p.LateWeight * (min(cost, 2*s.late) - s.late))
		}
		if s.spread != 0 {
			if over := max(off, -off) - 1; over > 0 {
				cost += float64(over * s.spread)
			}
			off++
		}
		if saved > p.SharedTokens {
			cost -= float64((saved - p.SharedTokens) * s.worth)
		}
		given := float64(c.RecentTokens) + float64(p.RequestTokens*float64(c.RecentRequests))
		cost += float64(given*s.balance) + float64(inFlight*float64(c.Tokens))
		if over := float64(c.Usage) - p.PressureFrom; over > 0 {
			cost += float64(over * s.pressure)
		}
		c.Score = float32(cost * 1e-6)
		if g := leg.Grade(c); g != candidates.BestGrade {
			cost += Busy * float64(candidates.BestGrade-g)
		}
		if best >= 0 && cost >= least {
			if cost > least || Order(c, f.Random, i) >= order {
				continue
			}
		}
		best, least, order = int32(i), cost, Order(c, f.Random, i)
	}
	return best
}

// saved is how many tokens' worth of prefill the row's blocks save: tokens that
// it holds, less what loading those of slower tiers costs.
func (p *Params) saved(c *abi.Candidate, prompt float64) float64 {
	if c.BlockTokens == 0 {
		if c.Home&abi.RolePrefill != 0 {
			return float64(p.HomeShare * prompt)
		}
		return 0
	}
	block := float64(c.BlockTokens)
	gpu := min(prompt, float64(float64(c.BlocksGPU)*block))
	if c.BlocksCPU|c.BlocksDisk == 0 {
		return gpu
	}
	micros := p.TokenMicros
	if c.TokenMicros > 0 {
		micros = float64(c.TokenMicros)
	}
	cpu := min(prompt-gpu, float64(float64(c.BlocksCPU)*block))
	disk := min(prompt-gpu-cpu, float64(float64(c.BlocksDisk)*block))
	return gpu + float64(cpu*max(0, 1-p.CPUMicros/micros)) + float64(disk*max(0, 1-p.DiskMicros/micros))
}

// Decode is what a stream costs at a row, without the transfer: tokens in flight
// slow each of its steps.
func (p *Params) Decode(c *abi.Candidate) float64 {
	cost := float64(p.DecodeMicros * float64(c.Tokens))
	if over := float64(c.Usage) - p.PressureFrom; over > 0 {
		cost += float64(over * p.pressure())
	}
	return cost
}

// Missing is how many of the prompt's tokens a row does not hold.
func Missing(c *abi.Candidate, prompt float64) float64 {
	return prompt - min(prompt, float64(c.Matched()))
}

// pressure is what KV memory in use costs for each share of it above the bound.
func (p *Params) pressure() float64 { return p.PressureSeconds * 1e6 / (1 - p.PressureFrom) }

// Order is that of rows of the same cost, the lowest first: a home, then fewer
// requests, then by lot.
func Order(c *abi.Candidate, random uint64, row int) uint64 {
	o := uint64(uint32(c.Requests))<<32 | candidates.Draw(random, row)
	if c.Home == 0 {
		o |= 1 << 63
	}
	return o
}
