// Package likely is a retain policy. It retains the KV of a finished turn while the next turn is
// likely enough for the memory that the KV takes.
package likely

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/param"
)

// Params are the parameters, [policy.params.likely].
type Params struct {
	PatienceSeconds float64
	TrustedTurns    float64
}

// Table describes the parameters.
func (p *Params) Table() param.Table {
	return param.Table{
		{Name: "patience_seconds", Value: &p.PatienceSeconds, Default: 500, Least: 0, Most: 1e6, Unit: "s",
			Meaning: "time for which KV may be retained for each next turn that comes, while half of the KV memory is in use"},
		{Name: "trusted_turns", Value: &p.TrustedTurns, Default: 8, Least: 1, Most: 1e4, Unit: "turns",
			Meaning: "number of turns from which on their gaps count alone; with fewer turns of a conversation, the gaps of the tool and of all conversations also count"},
	}
}

// Defaults returns the defaults of all parameters.
func Defaults() Params {
	var p Params
	p.Table().Reset()
	return p
}

// steps is the number of the times that the policy compares. Each is twice the time before it,
// and the last one is the longest time.
const steps = 16

// certain is the largest likelihood of the policy. With a full likelihood the proxy would not free the
// KV when memory is short.
const certain = abi.FullLikelihood - 1

// Retain chooses the time with the largest gain. The gain of a time is patience for the share of
// next turns that come within it, less the mean time for which the KV is then retained.
func (p *Params) Retain(f *abi.RetainFacts) abi.RetainDecision {
	if float64(f.All.Turns) < p.TrustedTurns { // then the proxy frees the KV when memory is short
		return abi.RetainDecision{Millis: f.MostMillis, Likelihood: abi.FullLikelihood / 2}
	}
	weights := p.weights(f)
	most := float64(f.MostMillis)
	patience := p.patience(f.Usage)
	var best abi.RetainDecision
	var gain, held, before, last float64
	for i := range steps {
		t := most / float64(uint32(1)<<(steps-1-i))
		back := p.back(f, &weights, t, most)
		held += (t - before) * (1 - (back+last)/2)
		if g := back*patience - held; g > gain {
			gain = g
			best = abi.RetainDecision{Millis: uint32(t), Likelihood: uint16(back * certain)}
		}
		before, last = t, back
	}
	return best
}

// patience returns the time in ms for which KV may be retained for each next turn that comes. The
// more memory is free, the longer it is.
func (p *Params) patience(usage float32) float64 {
	u := max(0.01, min(1, float64(usage)))
	return 1000 * p.PatienceSeconds * (1 - u) / u
}

// weights returns the weights of the three gaps: those of the conversation count before those of
// the tool, and those before the gaps of all.
func (p *Params) weights(f *abi.RetainFacts) (w [3]float64) {
	w[2] = 1
	for i, g := range [...]*abi.Gaps{&f.Conversation, &f.Tools} {
		w[i] = w[2] * min(1, float64(g.Turns)/p.TrustedTurns)
		w[2] -= w[i]
	}
	return w
}

// back returns the share of next turns that come within t.
func (p *Params) back(f *abi.RetainFacts, w *[3]float64, t, most float64) float64 {
	share := 0.0
	for i, g := range [...]*abi.Gaps{&f.Conversation, &f.Tools, &f.All} {
		if w[i] > 0 {
			share += w[i] * within(g, t, most)
		}
	}
	return max(0, min(1, share))
}

// within returns the share of turns whose next turn comes within t, by a line between each two
// quantiles.
func within(g *abi.Gaps, t, most float64) float64 {
	var from, low float64
	for _, q := range [...]struct{ at, share float64 }{
		{float64(g.P50), 0.5}, {float64(g.P75), 0.75}, {float64(g.P90), 0.9}, {float64(g.P95), 0.95}, {float64(g.P99), 0.99}, {most, 1},
	} {
		if t < q.at {
			return float64(g.Back) * (low + (q.share-low)*(t-from)/(q.at-from))
		}
		from, low = q.at, q.share
	}
	return float64(g.Back)
}
