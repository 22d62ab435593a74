package kvaware

import (
	"math"

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
	home    float64 // of patience, for the conversation's home
	balance float64 // of a token placed on a row of late
	request float64 // of a request placed there
	late    float64 // from here on waiting costs more
	weight  float64 // of what is above that
	held    float64 // of a µs above that which a request keeps its row from others, for each that came there of late
	few     float64 // so many that came there do not count
	even    float64 // so many are added for a row that lacks much of the mean row's work
	lack    float64 // of that work a row lacks lack - share x its tokens of late: 0 is
	share   float64 // the lower bound, and 1 the upper one
	spread  float64 // of being one row off the place for this size; 0: there is none
	place   float64 // for prompts of this size, counted in rows
}

// enough is how many requests each row had of late, on average, when it is known
// what sizes prompts have.
const enough = 4

// The loops over the rows are what a decision costs, and in a guest built by Go a
// jump costs more than the arithmetic of a row. So what is common goes straight
// on; what is bounded from below is half the sum of itself and its absolute value,
// for a comparison of floats is a jump and min and max of them are calls; and
// divisions are done before.

// Survey looks at all rows that can take the prefill leg, or the one leg of an
// aggregated request (RoleBoth). It leaves in the score of each how many tokens'
// worth of prefill it saves, for Prefill.
func (p *Params) Survey(f *abi.PlaceFacts, role abi.Role) Pool {
	rows, prompt := f.Candidates, max(1, f.Request.PromptTokens)
	n, measured, queued, best, other := 0, 0, int64(0), int64(0), uint32(0)
	micros, recent, requests, busy := 0.0, 0.0, 0.0, 0.0
	for i := range rows {
		c := &rows[i]
		if c.Roles&role == 0 {
			continue
		}
		n++
		if c.TokenMicros > 0 {
			measured++
		}
		micros += float64(c.TokenMicros)
		queued += c.Queued
		recent += float64(c.RecentTokens)
		requests += float64(c.RecentRequests)
		busy += float64(c.Busy)
		saved := min(int64(c.BlocksGPU)*int64(c.BlockTokens), prompt)
		best = max(best, saved)
		c.Score = float32(saved)
		other |= c.BlocksCPU | c.BlocksDisk
		if c.BlockTokens == 0 {
			other = 1
		}
	}
	if other != 0 {
		best = p.tiers(rows, role, float64(prompt))
	}
	s := Pool{prompt: float64(prompt), micros: p.TokenMicros, late: p.LateSeconds * 1e6}
	if measured > 0 {
		s.micros = micros / float64(measured)
	}
	typical := p.TypicalTokens
	if requests >= 1 {
		typical = max(1, recent/requests)
	}
	typical *= s.micros
	s.home = p.HomeRequests * typical
	all := float64(n)
	calm := p.calm(busy, all)
	s.weight = p.BusyLateWeight + float64(calm*(p.LateWeight-p.BusyLateWeight))
	mean := max(1, requests/max(1, all))
	s.held, s.few, s.even = calm*p.HeldWeight/mean, p.HeldFree*mean, p.EvenWeight*mean
	band := max(0.001, p.EvenTo-p.EvenFrom)
	s.lack, s.share = (1-p.EvenFrom)/band, all/(band*max(1, recent))
	s.balance = p.BalanceWeight * s.micros
	s.request = p.RequestTokens * s.balance
	if most := float64(best); most > p.SharedTokens {
		patience := p.Patience
		if f.Request.Turn == 1 {
			patience = p.FirstPatience
		}
		patience *= 1 + float64(p.BusyPatience*(1-calm))
		s.worth = patience * typical / (s.prompt * holders(rows, role, float32(0.75*most)))
	} else if requests >= enough*all {
		x := s.prompt * s.micros / (p.SizeMiddle * typical)
		s.place = all * x / (1 + x)
		s.spread = p.SizeSpread * typical / (all + float64(float64(queued)*s.micros)/typical)
	}
	return s
}

// calm is 1 while the rows have time to spare, and 0 once they are busy, by the
// sum of how busy they are.
func (p *Params) calm(busy, rows float64) float64 {
	span := max(0.001, p.BusyTo-p.BusyFrom)
	return min(1, max(0, (p.BusyTo-busy/max(1, rows))/span))
}

// tiers does Survey's part where rows hold blocks in slower memory, or where it is
// not known what they hold.
func (p *Params) tiers(rows []abi.Candidate, role abi.Role, prompt float64) (best int64) {
	for i := range rows {
		if c := &rows[i]; c.Roles&role != 0 {
			saved := p.saved(c, prompt)
			c.Score = float32(saved)
			best = max(best, saved)
		}
	}
	return best
}

// holders counts the rows that save so much.
func holders(rows []abi.Candidate, role abi.Role, enough float32) float64 {
	n := 0
	for i := range rows {
		c := &rows[i]
		if c.Roles&role == 0 {
			continue
		}
		if c.Score >= enough {
			n++
		}
	}
	return float64(n)
}

// Prefill leaves in the score of each row that Survey has seen what the prompt
// costs there, in seconds, and returns the cheapest row and the cost of the second
// one in µs; -1 without a row. The cost is what waits there, what is not saved,
// what was placed there of late, pressure, inFlight for each token in flight, and
// how far the row is from the place for prompts of this size, less the patience
// that its blocks are worth.
func (p *Params) Prefill(f *abi.PlaceFacts, role abi.Role, s *Pool, inFlight float64) (best int32, second float64) {
	rows, best, least, second := f.Candidates, int32(-1), math.MaxFloat64, math.MaxFloat64
	fast, slow, pressure := 0.5*s.micros, 2*s.micros, p.Pressure()
	grade := candidates.Prefill()
	off := 0.5 - s.place // of the row from its place
	held, lateness, spread, worth := 0.25*s.held, 0.5*s.weight, 0.5*s.spread, 0.5*s.worth
	for i := range rows {
		c := &rows[i]
		if c.Roles&role == 0 {
			continue
		}
		own, differs := float64(c.TokenMicros), 0
		if own > slow {
			differs = 1
		}
		if own < fast {
			differs = 1
		}
		if own == 0 {
			differs = 0
		}
		micros := s.micros + float64(float64(differs)*(own-s.micros))
		saved := float64(c.Score)
		cost := float64((s.prompt - saved) * micros)
		over, others, lack := cost-s.late, float64(c.RecentRequests)-s.few, s.lack-float64(s.share*float64(c.RecentTokens))
		others += math.Abs(others) + float64(s.even*(math.Abs(lack)-math.Abs(lack-1)+1))
		cost += float64(float64(p.QueueWeight*float64(c.Queued)) * micros)
		cost += float64(held * float64((over+math.Abs(over))*others))
		over = cost - s.late
		cost += float64(lateness * (math.Abs(over) - math.Abs(over-s.late) + s.late))
		over = math.Abs(off) - 1
		cost += float64(spread * (over + math.Abs(over)))
		off++
		over = saved - p.SharedTokens
		cost -= float64(worth * (over + math.Abs(over)))
		cost -= float64(s.home * float64(c.Home&abi.RolePrefill))
		cost += float64(float64(c.RecentTokens)*s.balance) + float64(float64(c.RecentRequests)*s.request)
		cost += float64(inFlight * float64(c.Tokens))
		over = float64(c.Usage) - p.PressureFrom
		cost += float64(pressure * (over + math.Abs(over)))
		c.Score = float32(cost * 1e-6)
		cost += Busy * float64(candidates.BestGrade-grade.Grade(c))
		if cost > second {
			continue
		}
		if cost < least || cost == least && Before(rows, int32(i), best, f.Random) {
			best, least, second = int32(i), cost, least
		} else {
			second = cost
		}
	}
	return best, second
}

// Decode leaves in the score of each row that suits the leg what the stream costs
// there, in seconds, and returns the cheapest row; -1 without one.
func (p *Params) Decode(f *abi.PlaceFacts, leg candidates.Leg) int32 {
	rows, best, least := f.Candidates, int32(-1), math.MaxFloat64
	prompt, pressure := f.Request.PromptTokens, p.Pressure()
	for i := range rows {
		c := &rows[i]
		if !leg.Suits(c, i) {
			continue
		}
		cost := p.Stream(c, pressure) + float64(p.TransferMicros*Missing(c, prompt))
		c.Score = float32(cost * 1e-6)
		cost += Busy * float64(candidates.BestGrade-leg.Grade(c))
		if cost > least {
			continue
		}
		if cost == least && !Before(rows, int32(i), best, ^f.Random) {
			continue
		}
		best, least = int32(i), cost
	}
	return best
}

// saved is how many tokens' worth of prefill the row's blocks save: tokens that
// it holds, less what loading those of slower tiers costs.
func (p *Params) saved(c *abi.Candidate, prompt float64) int64 {
	if c.BlockTokens == 0 {
		if c.Home&abi.RolePrefill != 0 {
			return int64(p.HomeShare * prompt)
		}
		return 0
	}
	block := float64(c.BlockTokens)
	gpu := min(prompt, float64(float64(c.BlocksGPU)*block))
	micros := p.TokenMicros
	if c.TokenMicros > 0 {
		micros = float64(c.TokenMicros)
	}
	cpu := min(prompt-gpu, float64(float64(c.BlocksCPU)*block))
	disk := min(prompt-gpu-cpu, float64(float64(c.BlocksDisk)*block))
	return int64(gpu + float64(cpu*max(0, 1-p.CPUMicros/micros)) + float64(disk*max(0, 1-p.DiskMicros/micros)))
}

// Stream is what a stream costs at a row, without the transfer: tokens in flight
// slow each of its steps.
func (p *Params) Stream(c *abi.Candidate, pressure float64) float64 {
	over := float64(c.Usage) - p.PressureFrom
	return float64(p.DecodeMicros*float64(c.Tokens)) + float64(pressure*(over+math.Abs(over)))
}

// Missing is how many of the prompt's tokens a row does not hold.
func Missing(c *abi.Candidate, prompt int64) float64 { return float64(max(0, prompt-c.Matched())) }

// Pressure is half of what KV memory in use costs for each share of it above the
// bound.
func (p *Params) Pressure() float64 { return p.PressureSeconds * 0.5e6 / (1 - p.PressureFrom) }

// Before reports whether row i is before row j, of the same cost: a home, then
// fewer requests, then by lot.
func Before(rows []abi.Candidate, i, j int32, random uint64) bool {
	return order(&rows[i], i, random) < order(&rows[j], j, random)
}

func order(c *abi.Candidate, row int32, random uint64) uint64 {
	o := uint64(uint32(c.Requests))<<32 | candidates.Draw(random, int(row))
	if c.Home == 0 {
		o |= 1 << 63
	}
	return o
}
