// Package pdauto is the built-in plan policy pd_auto: it chooses two legs only if two legs are
// estimated to give the first token sooner than one leg.
package pdauto

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/param"
	"github.com/pdproxy/pdproxy/policies/plan"
)

// Needs are the additional facts that the policy needs.
const Needs = abi.NeedBlocks

// Params are the parameters for operators. Table has names, defaults and bounds.
type Params struct {
	TokenMicros, BothTokenMicros   float64
	TransferMicros, HandoverMicros float64
	StreamMicros                   float64
	Margin                         float64
	LocalTokens                    float64
}

// Table describes the parameters; it points into p.
func (p *Params) Table() param.Table {
	const large = 1e9
	return param.Table{
		{Name: "token_micros", Value: &p.TokenMicros, Default: 100, Least: 0.001, Most: large, Unit: "µs", Meaning: "prefill of one uncached token on a prefill target, without a measurement; if only the other kind of target is measured, the ratio of this measurement to its parameter scales this value"},
		{Name: "both_token_micros", Value: &p.BothTokenMicros, Default: 150, Least: 0.001, Most: large, Unit: "µs", Meaning: "the same on a target for both phases, whose streams share its time"},
		{Name: "transfer_micros", Value: &p.TransferMicros, Default: 5, Most: large, Unit: "µs", Meaning: "transfer of the KV of one prompt token, without a measurement"},
		{Name: "handover_micros", Value: &p.HandoverMicros, Default: 20_000, Most: large, Unit: "µs", Meaning: "cost of two legs in addition to the transfer, without a measurement"},
		{Name: "stream_micros", Value: &p.StreamMicros, Default: 25, Most: large, Unit: "µs", Meaning: "time for which each uncached token delays the streams of a target for both phases; counts against one leg"},
		{Name: "margin", Value: &p.Margin, Default: 0, Most: 1, Meaning: "one leg is chosen only if it is faster by this share"},
		{Name: "local_tokens", Value: &p.LocalTokens, Default: -1, Least: -1, Most: large, Unit: "tokens", Meaning: "if not negative, a rule instead of the estimates: one leg if a target for both phases has a part of the prompt and at most this number of its tokens are uncached"},
	}
}

// Defaults returns the parameters with their default values.
func Defaults() Params {
	var p Params
	p.Table().Reset()
	return p
}

// Plan is the policy, a pure function of the facts that does not allocate. It
// reads p, which must not change during the call. If only one leg or only two
// legs are possible, it decides as auto does.
func (p *Params) Plan(f *abi.PlanFacts) abi.PlanDecision {
	if d := plan.Auto(f); d != abi.PlanDisaggregate || f.BothTargets == 0 {
		return d
	}
	if p.LocalTokens >= 0 {
		return p.conditional(f)
	}
	if p.one(f) < float64(p.two(f)*(1-p.Margin)) {
		return abi.PlanAggregate
	}
	return abi.PlanDisaggregate
}

// conditional is the rule of TensorRT-LLM's conditional disaggregation
// (conditional_disagg_config.max_local_prefill_length).
func (p *Params) conditional(f *abi.PlanFacts) abi.PlanDecision {
	if f.BothCached > 0 && float64(f.Request.PromptTokens-f.BothCached) <= p.LocalTokens {
		return abi.PlanAggregate
	}
	return abi.PlanDisaggregate
}

// one returns the estimated time of one leg until its first token, in µs.
func (p *Params) one(f *abi.PlanFacts) float64 {
	uncached := float64(max(0, f.Request.PromptTokens-f.BothCached))
	micros := known(f.BothMicros, likened(f.PrefillMicros, p.TokenMicros, p.BothTokenMicros))
	return float64((float64(max(0, f.BothQueued))+uncached)*micros) + float64(uncached*p.StreamMicros)
}

// two returns the same estimate for two legs, in µs. The whole prompt is
// transferred, cached or not.
func (p *Params) two(f *abi.PlanFacts) float64 {
	prompt := float64(max(0, f.Request.PromptTokens))
	uncached := float64(max(0, f.Request.PromptTokens-f.PrefillCached))
	micros := known(f.PrefillMicros, likened(f.BothMicros, p.BothTokenMicros, p.TokenMicros))
	return float64((float64(max(0, f.PrefillQueued))+uncached)*micros) +
		float64(prompt*known(f.TransferMicros, p.TransferMicros)) + known(f.HandoverMicros, p.HandoverMicros)
}

// likened returns the parameter of one kind of targets, scaled by the ratio of the other kind's
// measured value to its parameter. The assumption: all engines of an installation are slow or fast
// by the same factor.
func likened(measured float32, other, parameter float64) float64 {
	if measured > 0 {
		return float64(float64(measured)*parameter) / other
	}
	return parameter
}

// known returns the measured value, or the parameter if there is none.
func known(measured float32, parameter float64) float64 {
	if measured > 0 {
		return float64(measured)
	}
	return parameter
}
