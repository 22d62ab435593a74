package kvaware

import (
	"math"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
)

// Products are converted before they are added, here and in all code that uses
// the costs. The conversion prevents a compiler from fusing the two operations,
// whose rounding would differ from WebAssembly's. All costs are in µs.

// Busy is the cost of each step of a row's grade. It is larger than any estimate.
const Busy = 1e15

// Pool holds the values that are common to all candidates of a leg. Costs are in
// µs. "Recent" means the placements in Candidate.RecentTokens and
// RecentRequests. A row is a candidate.
type Pool struct {
	prompt  float64 // tokens of the prompt
	micros  float64 // cost of prefill for one uncached token, mean over the rows
	worth   float64 // cost that the policy accepts in order to save the prefill of one token
	home    float64 // cost that the policy accepts in order to stay at the conversation's home
	balance float64 // cost of each recent token of a row
	request float64 // cost of each recent request of a row
	late    float64 // limit of the estimated time; time above the limit costs more
	weight  float64 // weight of the time above late
	held    float64 // cost of each µs above late for each recent request of the row, because a long prefill blocks the row's other requests
	few     float64 // number of recent requests of a row that held does not count
	even    float64 // number of requests that held adds for a row with much less recent work than the mean row
	lack    float64 // the deficit of recent work of a row is lack - share x its recent tokens
	share   float64 // see lack; the deficit is limited to 0 to 1
	spread  float64 // cost of a distance of one row from place; 0: place is not used
	place   float64 // position of the rows for this prompt, by its size or by turns, counted in rows
	near    float64 // distance from place that costs nothing
}

// enough is the mean number of recent requests per row from which the sizes of
// prompts are known.
const enough = 4

// The loops over the rows dominate the cost of a decision, and in a guest built
// by Go a jump costs more than the arithmetic of a row. So the common case has
// no jump. A lower bound of 0 is computed as half the sum of a value and its
// absolute value, because a comparison of floats is a jump and min and max are
// calls. Divisions are done before the loop.

// Survey reads all rows that can take the prefill leg, or the one leg of an
// aggregated request (RoleBoth). It stores in the score of each row the number
// of prompt tokens whose prefill the row saves. Prefill uses it.
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
	s := Pool{prompt: float64(prompt), micros: p.TokenMicros, late: p.LateSeconds * 1e6, weight: p.LateWeight}
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
	mean := max(1, requests/max(1, all))
	held := p.BusyHeldWeight + float64(calm*(p.HeldWeight-p.BusyHeldWeight))
	s.held, s.few, s.even = held/mean, p.HeldFree*mean, p.EvenWeight*mean
	band := max(0.001, p.EvenTo-p.EvenFrom)
	s.lack, s.share = (1-p.EvenFrom)/band, all/(band*max(1, recent))
	s.balance = p.BalanceWeight * s.micros
	s.request = p.RequestTokens * s.balance
	switch most := float64(best); {
	case most > p.SharedTokens && f.Request.Shared > 0 && p.turns(f, role, &s, all, most, typical):
	case most > p.SharedTokens:
		holding := holders(rows, role, float32(0.75*most))
		s.worth = (float64(p.SavedWeight*s.micros) + float64((1-calm)*p.Patience*typical/s.prompt)) / holding
		s.home *= min(holding, homes)
	case requests >= enough*all:
		x := s.prompt * s.micros / (p.SizeMiddle * typical)
		s.place, s.near = all*x/(1+x), 1
		s.spread = (1 - calm) * p.SizeSpread * typical / (all + float64(float64(queued)*s.micros)/typical)
	}
	return s
}

// turns prepares the placement of a conversation that begins as many of the latest conversations
// did. To follow the shared beginning would bring all these conversations, with their later turns,
// to the same rows. So the beginning saves nothing, and the rows are taken in turn, those that do
// not hold the beginning first. It returns false if the rows that hold the beginning, whose longest
// match is most tokens, are enough for the share of these conversations.
//
// The number of rows that may hold a beginning grows with the square of its share. A beginning that
// a quarter of the conversations share may be at all rows. A beginning of a sixteenth may be at a
// sixteenth of the rows, because each further row computes it once more.
func (p *Params) turns(f *abi.PlaceFacts, role abi.Role, s *Pool, rows, most, typical float64) bool {
	holding := holders(f.Candidates, role, float32(0.75*most))
	share := float64(f.Request.Shared) / abi.SharedOf
	if holding < rows && float64(float64(16*share)*share)*rows <= holding {
		return false
	}
	s.place = float64(f.Sequence%uint64(rows)) + 0.5
	s.spread = homes * p.HomeRequests * max(typical, s.prompt*s.micros)
	s.worth = -s.micros
	if holding < rows {
		s.worth -= rows * s.spread / (most - p.SharedTokens)
	}
	return true
}

// homes is the limit of the factor for home_requests. The patience for blocks is divided by the rows
// that hold the beginning of the prompt. So if several rows hold a long system prompt, only
// home_requests keeps the few blocks of the conversation itself at its home.
const homes = 2

// calm returns 1 while the rows have spare time and 0 once they are busy. busy
// is the sum of their Busy values.
func (p *Params) calm(busy, rows float64) float64 {
	span := max(0.001, p.BusyTo-p.BusyFrom)
	return min(1, max(0, (p.BusyTo-busy/max(1, rows))/span))
}

// tiers does Survey's part for rows with blocks in slower memory, or with an
// unknown block size.
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

// holders counts the rows whose saved tokens are at least enough.
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

// Prefill stores in the score of each row that Survey has read the cost of the
// prompt there, in seconds. It returns the cheapest row, -1 without one, and
// the cost of the second cheapest in µs. The cost consists of the queued
// tokens, the tokens that are not saved, the recent placements, pressure,
// inFlight for each token in flight, and the distance of the row from the place
// for prompts of this size, less the patience for its blocks.
func (p *Params) Prefill(f *abi.PlaceFacts, role abi.Role, s *Pool, inFlight float64) (best int32, second float64) {
	rows, best, least, second := f.Candidates, int32(-1), math.MaxFloat64, math.MaxFloat64
	fast, slow, pressure := 0.5*s.micros, 2*s.micros, p.Pressure()
	grade := candidates.Prefill()
	off := 0.5 - s.place // distance of the row from its place
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
		over = math.Abs(off) - s.near
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

// decode stores in the score of each row that suits the leg the cost of the
// stream there, in seconds. It returns the cheapest row, -1 without one.
func (p *Params) decode(f *abi.PlaceFacts, leg candidates.Leg) int32 {
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

// saved returns the number of prompt tokens whose prefill the row's blocks
// save: the tokens that it holds, less the cost of loading those of slower
// tiers.
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

// Stream returns the cost of a stream at a row, without the transfer: tokens in
// flight slow each of its steps.
func (p *Params) Stream(c *abi.Candidate, pressure float64) float64 {
	over := float64(c.Usage) - p.PressureFrom
	return float64(p.DecodeMicros*float64(c.Tokens)) + float64(pressure*(over+math.Abs(over)))
}

// Missing returns the number of the prompt's tokens that a row does not hold.
func Missing(c *abi.Candidate, prompt int64) float64 { return float64(max(0, prompt-c.Matched())) }

// Pressure returns half the cost of KV memory in use, for each share above the
// bound.
func (p *Params) Pressure() float64 { return p.PressureSeconds * 0.5e6 / (1 - p.PressureFrom) }

// Before reports whether row i precedes row j of the same cost: a home first,
// then fewer requests, then by a random draw.
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
