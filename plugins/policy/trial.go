package policy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
)

// quiet is the Env of the VM that is tried. Once it is muted the guest reaches
// nothing that lasts: what it says and counts of made-up requests is lost. Used
// by one goroutine.
type quiet struct {
	host.Env
	muted bool
}

// Log implements host.Env.
func (q *quiet) Log(level host.LogLevel, message string) {
	if !q.muted {
		q.Env.Log(level, message)
	}
}

// SetTickPeriod implements host.Env.
func (q *quiet) SetTickPeriod(root uint32, period time.Duration) {
	if !q.muted {
		q.Env.SetTickPeriod(root, period)
	}
}

// SetProperty implements host.Env.
func (q *quiet) SetProperty(ctx uint32, path []string, value []byte) host.Status {
	if q.muted {
		return host.OK
	}
	return q.Env.SetProperty(ctx, path, value)
}

// SetSharedData implements host.Env.
func (q *quiet) SetSharedData(key string, value []byte, cas uint32) host.Status {
	if q.muted {
		return host.OK
	}
	return q.Env.SetSharedData(key, value, cas)
}

// Enqueue implements host.Env.
func (q *quiet) Enqueue(queue uint32, value []byte) host.Status {
	if q.muted {
		return host.OK
	}
	return q.Env.Enqueue(queue, value)
}

// Dequeue implements host.Env.
func (q *quiet) Dequeue(queue uint32) ([]byte, host.Status) {
	if q.muted {
		return nil, host.Empty
	}
	return q.Env.Dequeue(queue)
}

// RecordMetric implements host.Env.
func (q *quiet) RecordMetric(id uint32, value uint64) host.Status {
	if q.muted {
		return host.OK
	}
	return q.Env.RecordMetric(id, value)
}

// IncrementMetric implements host.Env.
func (q *quiet) IncrementMetric(id uint32, delta int64) host.Status {
	if q.muted {
		return host.OK
	}
	return q.Env.IncrementMetric(id, delta)
}

// HTTPCall implements host.Env.
func (q *quiet) HTTPCall(root uint32, call *host.HTTPCall) (uint32, host.Status) {
	if q.muted {
		return 0, host.InternalFailure
	}
	return q.Env.HTTPCall(root, call)
}

// Foreign implements host.Env.
func (q *quiet) Foreign(ctx uint32, name string, args []byte) ([]byte, host.Status) {
	if q.muted {
		return nil, host.NotFound
	}
	return q.Env.Foreign(ctx, name, args)
}

// tryOut starts a VM that is used for nothing else, reads from it which policies
// there are, and shows each of them a few made-up requests. An error means that
// the module cannot be used. What its hooks do wrong is kept for Trial. A module
// that nothing can interrupt is only read.
func (v *Version) tryOut(ctx context.Context) error {
	env := &quiet{Env: v.opts.NewEnv()}
	m, err := v.newVM(ctx, env)
	if err != nil {
		return err
	}
	defer func() { _ = m.close(ctx) }() // what the trial found is returned
	if err := v.describe(ctx, m); err != nil {
		return err
	}
	if !v.opts.Load.Guarded {
		return nil
	}
	env.muted = true
	for _, p := range v.policies {
		if reason := p.tryOn(m); reason != "" && v.trial == nil {
			v.trial = fmt.Errorf("try policy %s: hook %s: %s", p.Label, p.Hook, reason)
			if err := m.Err(); err != nil {
				v.trial = fmt.Errorf("%w: %w", v.trial, err)
			}
		}
		if m.Err() != nil {
			break
		}
	}
	return nil
}

// Trial is what went wrong when the version was shown made-up requests before
// it served; nil: nothing.
func (v *Version) Trial() error { return v.trial }

// tryOn shows the policy made-up requests in VM m, which no pool holds, and
// returns the first reason why there is no decision.
func (p *Policy) tryOn(m *vm) (reason string) {
	ask := func(frame int, encode func(dst []byte, h *abi.Header) []byte, sound func(answer uint64) bool) {
		if reason != "" {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), max(p.version.opts.Budget, trialBudget))
		defer cancel()
		scratch, at, err := m.Scratch(ctx, roomFor(frame))
		if err != nil {
			reason = reasonOf(err)
			return
		}
		h := p.header(time.Now())
		answer, err := m.hooks[p.Hook].Call(ctx, at, uint32(len(encode(scratch[:0], &h))))
		switch {
		case err != nil:
			reason = reasonOf(err)
		case !sound(uint64(answer)):
			reason = Nonsense
		}
	}
	request := abi.RequestFacts{PromptTokens: 1000, MaxTokens: -1, N: 1, Stream: true}
	switch p.Hook {
	case abi.HookPlan:
		for _, f := range []abi.PlanFacts{{Request: request, PrefillTargets: 2, DecodeTargets: 2}, {Request: request, BothTargets: 1}} {
			ask(f.FrameSize(), func(dst []byte, h *abi.Header) []byte { return abi.AppendPlan(dst, h, &f) },
				func(a uint64) bool { _, ok := abi.UnpackPlan(a); return ok })
		}
	case abi.HookPlace:
		for _, f := range trialTables(request) {
			ask(f.FrameSize(), func(dst []byte, h *abi.Header) []byte { return abi.AppendPlace(dst, h, &f) },
				func(a uint64) bool { return f.Allows(abi.UnpackPlace(a)) })
		}
	case abi.HookMint:
		f := abi.MintFacts{UnixMilli: time.Now().UnixMilli(), Counter: 1}
		ask(f.FrameSize(), func(dst []byte, h *abi.Header) []byte { return abi.AppendMint(dst, h, &f) },
			func(a uint64) bool { return a == 0 || a >= abi.MinDisaggID && a < abi.MaxDisaggID })
	case abi.HookLeg:
		for _, f := range []abi.LegFacts{
			{Request: request, Phase: abi.Prefill, Flow: abi.FlowPrefillFirst, Attempt: 1, Left: 2, Instance: 1, Partner: 2, ID: abi.MinDisaggID, Engine: "p0"},
			{Request: request, Event: abi.LegFailed, Flow: abi.FlowAggregated, Attempt: 1, Left: 2, Instance: 1, Engine: "e0", Status: 500, Reason: "status"},
		} {
			ask(f.FrameSize(), func(dst []byte, h *abi.Header) []byte { return abi.AppendLeg(dst, h, &f) },
				func(a uint64) bool { _, ok := abi.UnpackLeg(a, f.Event); return ok })
		}
	case abi.HookFinish:
		f := abi.FinishFacts{Request: request, Outcome: abi.OutcomeOK, Flow: abi.FlowAggregated, Status: 200, Decode: 1, Attempts: 1, PromptTokens: -1, CachedTokens: -1, OutputTokens: -1}
		ask(f.FrameSize(), func(dst []byte, h *abi.Header) []byte { return abi.AppendFinish(dst, h, &f) },
			func(uint64) bool { return true })
	}
	return reason
}

// trialBudget is how long a made-up request may take at least: the first calls
// of a guest are its slowest.
const trialBudget = 50 * time.Millisecond

// trialTables are a pair to be placed, one with its prefill fixed, and one leg.
func trialTables(request abi.RequestFacts) []abi.PlaceFacts {
	var rows []abi.Candidate
	for i, role := range []abi.Role{abi.RolePrefill, abi.RolePrefill, abi.RoleDecode, abi.RoleDecode} {
		rows = append(rows, abi.Candidate{Instance: uint32(i + 1), Group: 1, Roles: role, Requests: int32(i), Tokens: int64(100 * i)})
	}
	both := []abi.Candidate{{Instance: 1, Roles: abi.RoleBoth}, {Instance: 2, Roles: abi.RoleBoth, Requests: 1, Tokens: 9}}
	return []abi.PlaceFacts{
		{Request: request, Flow: abi.FlowPrefillFirst, Fixed: -1, Candidates: rows},
		{Request: request, Flow: abi.FlowPrefillFirst, Fixed: 0, Candidates: append(rows[:1:1], rows[2:]...)},
		{Request: request, Flow: abi.FlowAggregated, Fixed: -1, Candidates: both},
	}
}

// errNoHook is what a module without hooks is refused with.
var errNoHook = errors.New("load policy: the module exports no hook (pdproxy_v1_on_...)")
