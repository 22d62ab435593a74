package policy

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
)

// trialEnv is the Env of the VM of a trial. After discard is set, the guest's
// log lines, metrics and other changes for made-up requests are dropped. Only
// one goroutine uses it.
type trialEnv struct {
	host.Env
	discard bool
}

// Log implements host.Env.
func (e *trialEnv) Log(level host.LogLevel, message string) {
	if !e.discard {
		e.Env.Log(level, message)
	}
}

// SetTickPeriod implements host.Env.
func (e *trialEnv) SetTickPeriod(root uint32, period time.Duration) {
	if !e.discard {
		e.Env.SetTickPeriod(root, period)
	}
}

// SetProperty implements host.Env.
func (e *trialEnv) SetProperty(ctx uint32, path []string, value []byte) host.Status {
	if e.discard {
		return host.OK
	}
	return e.Env.SetProperty(ctx, path, value)
}

// SetSharedData implements host.Env.
func (e *trialEnv) SetSharedData(key string, value []byte, cas uint32) host.Status {
	if e.discard {
		return host.OK
	}
	return e.Env.SetSharedData(key, value, cas)
}

// Enqueue implements host.Env.
func (e *trialEnv) Enqueue(queue uint32, value []byte) host.Status {
	if e.discard {
		return host.OK
	}
	return e.Env.Enqueue(queue, value)
}

// Dequeue implements host.Env.
func (e *trialEnv) Dequeue(queue uint32) ([]byte, host.Status) {
	if e.discard {
		return nil, host.Empty
	}
	return e.Env.Dequeue(queue)
}

// RecordMetric implements host.Env.
func (e *trialEnv) RecordMetric(id uint32, value uint64) host.Status {
	if e.discard {
		return host.OK
	}
	return e.Env.RecordMetric(id, value)
}

// IncrementMetric implements host.Env.
func (e *trialEnv) IncrementMetric(id uint32, delta int64) host.Status {
	if e.discard {
		return host.OK
	}
	return e.Env.IncrementMetric(id, delta)
}

// HTTPCall implements host.Env.
func (e *trialEnv) HTTPCall(root uint32, call *host.HTTPCall) (uint32, host.Status) {
	if e.discard {
		return 0, host.InternalFailure
	}
	return e.Env.HTTPCall(root, call)
}

// Foreign implements host.Env.
func (e *trialEnv) Foreign(ctx uint32, name string, args []byte) ([]byte, host.Status) {
	if e.discard {
		return nil, host.NotFound
	}
	return e.Env.Foreign(ctx, name, args)
}

// tryOut starts a VM that is used for nothing else, reads the list of its
// policies, and calls each of them with a few made-up requests. An error means
// that the module cannot be used. Failures of its hooks are kept for Trial. The
// hooks of a module that cannot be interrupted are not called.
func (v *Version) tryOut(ctx context.Context) error {
	env := &trialEnv{Env: v.opts.NewEnv()}
	m, err := v.newVM(ctx, env)
	if err != nil {
		return err
	}
	defer func() { _ = m.close(ctx) }() // the result of the trial is returned instead
	if err := v.describe(ctx, m); err != nil {
		return err
	}
	if !v.opts.Load.Guarded {
		return nil
	}
	env.discard = true
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

// Trial returns the failure of a policy on made-up requests before the version
// served; nil if there was none.
func (v *Version) Trial() error { return v.trial }

// tryOn calls the policy with made-up requests in VM m, which no pool holds,
// and returns the first reason why there is no decision.
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
			ask(f.FrameSize(&p.layout), func(dst []byte, h *abi.Header) []byte { return abi.AppendPlan(dst, h, &f) },
				func(a uint64) bool { _, ok := abi.UnpackPlan(a); return ok })
		}
	case abi.HookPlace:
		for _, f := range trialTables(request, p.allNeeds()) {
			ask(f.FrameSize(&p.layout), func(dst []byte, h *abi.Header) []byte { return abi.AppendPlace(dst, h, &f) },
				func(a uint64) bool { return f.Allows(abi.UnpackPlace(a)) })
		}
	case abi.HookScore:
		frames, scorers := p.scoreFrames(trialTables(request, p.allNeeds()))
		for _, f := range frames {
			ask(f.FrameSize(&p.layout, len(scorers)), func(dst []byte, h *abi.Header) []byte { return abi.AppendScore(dst, h, &f, scorers) },
				func(a uint64) bool { return a == abi.ScoreDone })
		}
	case abi.HookMint:
		f := abi.MintFacts{UnixMilli: time.Now().UnixMilli(), Counter: 1}
		ask(abi.MintFrameSize, func(dst []byte, h *abi.Header) []byte { return abi.AppendMint(dst, h, &f) },
			func(a uint64) bool { return a == 0 || a >= abi.MinDisaggID && a < abi.MaxDisaggID })
	case abi.HookLeg:
		for _, f := range []abi.LegFacts{
			{Request: request, Phase: abi.Prefill, Flow: abi.FlowPrefillFirst, Attempt: 1, Left: 2, Instance: 1, Partner: 2, ID: abi.MinDisaggID, Engine: "p0"},
			{Request: request, Event: abi.LegFailed, Flow: abi.FlowAggregated, Attempt: 1, Left: 2, Instance: 1, Engine: "e0", Status: 500, Reason: "status"},
		} {
			ask(f.FrameSize(&p.layout), func(dst []byte, h *abi.Header) []byte { return abi.AppendLeg(dst, h, &f) },
				func(a uint64) bool { _, ok := abi.UnpackLeg(a, f.Event); return ok })
		}
	case abi.HookFinish:
		f := abi.FinishFacts{Request: request, Outcome: abi.OutcomeOK, Flow: abi.FlowAggregated, Status: 200, Decode: 1, Attempts: 1, PromptTokens: -1, CachedTokens: -1, OutputTokens: -1}
		ask(f.FrameSize(&p.layout), func(dst []byte, h *abi.Header) []byte { return abi.AppendFinish(dst, h, &f) },
			func(uint64) bool { return true })
	}
	if p.Hook == abi.HookRetain {
		for _, f := range []abi.RetainFacts{{MostMillis: 1000, Tokens: 100}, {ToolCall: true, MostMillis: 450_000, Tokens: 100, Usage: 0.5, All: abi.Gaps{Turns: 1, Back: 1, P50: 1, P75: 2, P90: 3, P95: 4, P99: 5}}} {
			ask(abi.RetainFrameSize, func(dst []byte, h *abi.Header) []byte { return abi.AppendRetain(dst, h, &f) },
				func(a uint64) bool { _, ok := abi.UnpackRetain(a); return ok })
		}
	}
	if p.Hook == abi.HookEvict {
		f := abi.EvictFacts{PromptTokens: 1000, Running: []abi.Evictable{{Priority: -1, Phase: abi.Decode, Decode: 1, AgeMicros: 1000, Sent: 5}, {Priority: -1, Phase: abi.Prefill, Prefill: 2, Decode: 1}}}
		ask(f.FrameSize(), func(dst []byte, h *abi.Header) []byte { return abi.AppendEvict(dst, h, &f) },
			func(a uint64) bool { _, ok := abi.UnpackEvict(a, &f); return ok })
	}
	return reason
}

// trialBudget is the least time limit of a made-up request. No client waits for a trial.
// The limit only ends a guest that loops. A shorter limit would refuse a good canary
// when other processes use the processors, and the first calls of a guest are its slowest.
const trialBudget = time.Second

// trialTables are three placements: a pair, a pair with fixed prefill, and one
// leg. Of engines that have told nothing yet, the policy gets the rows that it needs.
func trialTables(request abi.RequestFacts, needs abi.Needs) []abi.PlaceFacts {
	var rows []abi.Candidate
	for i, role := range []abi.Role{abi.RolePrefill, abi.RolePrefill, abi.RoleDecode, abi.RoleDecode} {
		rows = append(rows, abi.Candidate{Instance: uint32(i + 1), Group: 1, Roles: role, Requests: int32(i), Tokens: int64(100 * i)})
	}
	both := []abi.Candidate{{Instance: 1, Roles: abi.RoleBoth}, {Instance: 2, Roles: abi.RoleBoth, Requests: 1, Tokens: 9}}
	tables := []abi.PlaceFacts{
		{Request: request, Flow: abi.FlowPrefillFirst, Fixed: -1, Candidates: rows},
		{Request: request, Flow: abi.FlowPrefillFirst, Fixed: 0, Candidates: append(rows[:1:1], rows[2:]...)},
		{Request: request, Flow: abi.FlowAggregated, Fixed: -1, Candidates: both},
	}
	for i := range tables {
		f := &tables[i]
		if needs&abi.NeedDetails != 0 {
			f.Details = slices.Repeat([]abi.Detail{{Weight: 1, Running: -1, Waiting: -1}}, len(f.Candidates))
		}
		if needs&abi.NeedPredictions != 0 {
			f.Predictions = make([]abi.Prediction, len(f.Candidates))
		}
	}
	return tables
}

// errNoHook is the error for a module without hooks.
var errNoHook = errors.New("load policy: the module exports no hook (pdproxy_v1_on_...)")
