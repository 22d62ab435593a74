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
}

// enough is how many requests each row had of late, on average, when it is known
// what sizes prompts have.
const enough = 4

// Survey looks at all rows that suit the leg. It leaves in the score of each how
// many tokens' worth of prefill it saves, for Prefill.
func (p *Params) Survey(f *abi.PlaceFacts, leg candidates.Leg) Pool {
	rows := f.Candidates
	s := Pool{prompt: float64(max(1, f.Request.PromptTokens)), micros: p.TokenMicros, late: p.LateSeconds * 1e6}
	n, best, micros, measured, recent, requests := 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
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
		recent += float64(c.RecentTokens)
		requests += float64(c.RecentRequests)
		saved := p.saved(c, s.prompt)
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
		s.spread = p.SizeSpread * typical / max(1, n)
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

// Prefill is what the prompt costs at a row that Survey has seen, which is the
// nth of those that suit the leg: what waits there, what is not saved, what was
// placed there of late, pressure, and how far the row is from the place of
// prompts of this size, less the patience that its blocks are worth.
func (p *Params) Prefill(c *abi.Candidate, s *Pool, nth int) float64 {
	micros := s.micros
	if own := float64(c.TokenMicros); own > 2*micros || own > 0 && own < 0.5*micros {
		micros = own
	}
	saved := float64(c.Score)
	cost := (s.prompt - saved + float64(p.QueueWeight*float64(max(0, c.Queued)))) * micros
	if cost > s.late {
		cost += float64(p.LateWeight * (min(cost, 2*s.late) - s.late))
	}
	if over := max(float64(nth)+0.5-s.place, s.place-float64(nth)-0.5) - 1; over > 0 {
		cost += float64(over * s.spread)
	}
	if saved > p.SharedTokens {
		cost -= float64((saved - p.SharedTokens) * s.worth)
	}
	return cost + float64(float64(c.RecentTokens)*s.balance) + p.pressure(c)
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
	return float64(p.DecodeMicros*float64(max(0, c.Tokens))) + p.pressure(c)
}

// Missing is how many of the prompt's tokens a row does not hold.
func Missing(c *abi.Candidate, prompt float64) float64 {
	return prompt - min(prompt, float64(c.Matched()))
}

// pressure is what the row's KV memory in use costs.
func (p *Params) pressure(c *abi.Candidate) float64 {
	over := float64(c.Usage) - p.PressureFrom
	if over <= 0 {
		return 0
	}
	return over / (1 - p.PressureFrom) * p.PressureSeconds * 1e6
}

// Order is that of rows of the same cost, the lowest first: a home, then fewer
// requests, then by lot.
func Order(c *abi.Candidate, random uint64, row int) uint64 {
	o := uint64(uint32(c.Requests))<<32 | candidates.Draw(random, row)
	if c.Home == 0 {
		o |= 1 << 63
	}
	return o
}
