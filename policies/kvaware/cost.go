package kvaware

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// Products are converted before they are added, here and in Prefill: the
// conversion keeps a compiler from fusing the two, which rounds otherwise than
// WebAssembly does.

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

// pressure is what the row's KV memory in use costs, in µs.
func (p *Params) pressure(c *abi.Candidate) float64 {
	over := float64(c.Usage) - p.PressureFrom
	if over <= 0 {
		return 0
	}
	return over / (1 - p.PressureFrom) * p.PressureSeconds * 1e6
}

// tie orders rows of the same cost, the lowest first: a home, then fewer
// requests, then by lot.
func tie(c *abi.Candidate, random uint64, row int) uint64 {
	o := uint64(uint32(c.Requests))<<32 | candidates.Draw(random, row)
	if c.Home == 0 {
		o |= 1 << 63
	}
	return o
}

// Decode returns the row on which the stream is estimated to fare best: tokens
// in flight slow each of its steps, and what the row does not hold of the
// prompt's KV must be transferred. The scores of the rows are the estimates in
// seconds; less is better.
func (p *Params) Decode(f *abi.PlaceFacts, leg candidates.Leg) int32 {
	prompt := float64(max(1, f.Request.PromptTokens))
	rows, best, least, order := f.Candidates, int32(-1), 0.0, uint64(0)
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) {
			continue
		}
		held := min(prompt, float64(float64(c.BlocksGPU+c.BlocksCPU+c.BlocksDisk)*float64(c.BlockTokens)))
		cost := float64(p.DecodeMicros*float64(c.Tokens)) + float64(p.TransferMicros*(prompt-held)) + p.pressure(c)
		c.Score = float32(cost * 1e-6)
		if cost += busy * float64(4-leg.Grade(c)); best >= 0 && cost > least {
			continue
		}
		o := tie(c, f.Random, i)
		if best >= 0 && cost == least && o >= order {
			continue
		}
		best, least, order = int32(i), cost, o
	}
	return best
}
