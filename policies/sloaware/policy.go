// Package sloaware is the built-in place policy slo_aware: it places a request where the
// predicted times keep its targets, and keeps requests that no target can serve in time
// away from those that can be served in time.
package sloaware

import (
	"math"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/candidates"
	"github.com/pdproxy/pdproxy/policies/kvaware"
	"github.com/pdproxy/pdproxy/policies/param"
)

// Needs are the additional facts that the policy needs.
const Needs = kvaware.Needs | abi.NeedPredictions

// Params are the parameters for operators: the targets, and the parameters of kv_aware.
type Params struct {
	KV                        kvaware.Params
	TTFTSeconds, TokenSeconds float64
	Margin                    float64
	LateSpan                  float64
	WorkWeight                float64
	WaitWeight                float64
}

// Table describes the parameters; it points into p.
func (p *Params) Table() param.Table {
	return append(p.KV.Table(),
		param.Param{Name: "ttft_seconds", Value: &p.TTFTSeconds, Default: 4, Least: 0.001, Most: 1e6, Unit: "s", Meaning: "target of the time to first token"},
		param.Param{Name: "token_seconds", Value: &p.TokenSeconds, Default: 0.04, Least: 0.0001, Most: 1e6, Unit: "s", Meaning: "target of the time between two tokens of the answer"},
		param.Param{Name: "margin", Value: &p.Margin, Default: 1, Most: 100, Meaning: "expected errors of a prediction that are added to it before it is compared with a target"},
		param.Param{Name: "late_span", Value: &p.LateSpan, Default: 8, Most: 1e6, Meaning: "wait on a target, in targets of the time to first token, up to which the target gets further requests that no target serves in time"},
		param.Param{Name: "work_weight", Value: &p.WorkWeight, Default: 1, Most: 1000, Meaning: "w"},
		param.Param{Name: "wait_weight", Value: &p.WaitWeight, Default: 0.1, Most: 1000, Meaning: "w"},
	)
}

// Defaults returns the parameters with their default values.
func Defaults() Params {
	var p Params
	p.Table().Reset()
	return p
}

// Place is the policy, a pure function of the facts that does not allocate. It reads p,
// which must not change during the call. Without predictions of prefill it decides as
// kv_aware does. An index of -1 for a leg means that no candidate fits.
func (p *Params) Place(f *abi.PlaceFacts) abi.PlaceDecision {
	d := p.KV.Place(f)
	if len(f.Predictions) != len(f.Candidates) || d.Decode < 0 {
		return d
	}
	if f.Flow == abi.FlowAggregated {
		if row := p.prefill(f, candidates.Aggregated(), 0); row >= 0 {
			d.Decode = row
		}
		return d
	}
	if f.Fixed < 0 {
		if row := p.prefill(f, candidates.Prefill(), float64(f.Predictions[d.Decode].Start)); row >= 0 {
			d.Prefill = row
		}
	}
	return d
}

func (p *Params) prefill(f *abi.PlaceFacts, leg candidates.Leg, start float64) int32 {
	limit := p.TTFTSeconds*1e6 - start
	best, least, grade := int32(-1), math.MaxFloat64, 0
	late, lateCost := int32(-1), math.MaxFloat64
	for i := range f.Candidates {
		c := &f.Candidates[i]
		if !leg.Suits(c, i) {
			continue
		}
		g := leg.Grade(c)
		if g < grade {
			continue
		}
		q := &f.Predictions[i]
		if q.Prefill == 0 {
			return -1
		}
		if g > grade {
			best, least, late, lateCost, grade = -1, math.MaxFloat64, -1, math.MaxFloat64, g
		}
		total, wait := float64(q.Prefill), float64(q.Wait)
		work := total - wait
		if total+float64(p.Margin*float64(q.PrefillError)) <= limit {
			cost := float64(p.WorkWeight*work) + float64(p.WaitWeight*wait)
			if p.WorkWeight == 0 {
				cost = float64(c.Score)
			}
			if cost < least {
				best, least = int32(i), cost
			}
			continue
		}
		cost := work
		switch {
		case wait > p.LateSpan*limit:
			cost += 2e12 + wait
		case wait > limit:
			cost += 0.1*wait
		default:
			cost += 1e12 - wait
		}
		if cost < lateCost {
			late, lateCost = int32(i), cost
		}
	}
	if best < 0 {
		return late
	}
	return best
}
