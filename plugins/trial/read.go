package trial

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/pdproxy/pdproxy/abi"
)

// ReadFrames reads recorded frames: a sequence of JSON values. Each is a frame,
// a list of frames, or the output of `pdproxy explain --json`. docs/reference/plugin-frames.md
// has the fields.
func ReadFrames(r io.Reader) ([]Frame, error) {
	var frames []Frame
	for dec := json.NewDecoder(r); ; {
		var value json.RawMessage
		if err := dec.Decode(&value); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("frame %d: %w", len(frames), err)
		}
		list := []json.RawMessage{value}
		if value[0] == '[' {
			if err := json.Unmarshal(value, &list); err != nil {
				return nil, err
			}
		}
		for _, text := range list {
			f, err := readFrame(text)
			if err != nil {
				return nil, fmt.Errorf("frame %d: %w", len(frames), err)
			}
			frames = append(frames, f)
		}
	}
	if len(frames) == 0 {
		return nil, errors.New("no frame in the file")
	}
	return frames, nil
}

// readFrame reads one frame, or makes the frame of an explanation.
func readFrame(text json.RawMessage) (Frame, error) {
	var head struct {
		Hook      string `json:"hook"`
		RequestID string `json:"request_id"`
	}
	if err := json.Unmarshal(text, &head); err != nil {
		return Frame{}, err
	}
	if head.Hook == "" && head.RequestID != "" {
		return explainedFrame(text)
	}
	if head.Hook == httpHook {
		return readHTTP(text)
	}
	hook, ok := abi.ParseHook(head.Hook)
	if !ok {
		return Frame{}, fmt.Errorf("hook: %q is not plan, place, mint, leg, finish, retain, score, evict or http", head.Hook)
	}
	f, err := map[abi.Hook]func(json.RawMessage) (Frame, error){
		abi.HookPlan: readPlan, abi.HookPlace: readPlace, abi.HookMint: readMint,
		abi.HookLeg: readLeg, abi.HookFinish: readFinish, abi.HookRetain: readRetain,
		abi.HookScore: readScore, abi.HookEvict: readEvict,
	}[hook](text)
	f.hook = hook
	return f, err
}

// strictly decodes a value and rejects unknown keys.
func strictly(text json.RawMessage, into any) error {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	return dec.Decode(into)
}

func readPlan(text json.RawMessage) (Frame, error) {
	j := planJSON{Request: plainRequest()}
	if err := strictly(text, &j); err != nil {
		return Frame{}, err
	}
	return Frame{frameHead: j.frameHead, plan: &abi.PlanFacts{
		Request: j.Request.facts(), PrefillTargets: j.PrefillTargets, DecodeTargets: j.DecodeTargets, BothTargets: j.BothTargets,
		PlanCosts: abi.PlanCosts{
			PrefillCached: j.PrefillCached, BothCached: j.BothCached, PrefillQueued: j.PrefillQueued, BothQueued: j.BothQueued,
			PrefillMicros: j.PrefillMicros, BothMicros: j.BothMicros,
			TransferMicros: j.TransferMicros, HandoverMicros: j.HandoverMicros,
		},
	}}, nil
}

func readPlace(text json.RawMessage) (Frame, error) {
	j := placeJSON{Request: plainRequest(), Fixed: -1, Flow: abi.FlowPrefillFirst.String()}
	if err := strictly(text, &j); err != nil {
		return Frame{}, err
	}
	return j.frame()
}

// explainedFrame returns the place frame of an explanation. Facts of the
// request that the explanation lacks get the defaults of a frame.
func explainedFrame(text json.RawMessage) (Frame, error) {
	var e struct {
		RequestID  string          `json:"request_id"`
		Flow       string          `json:"flow"`
		Model      string          `json:"model"`
		Candidates []candidateJSON `json:"candidates"`
	}
	if err := json.Unmarshal(text, &e); err != nil {
		return Frame{}, err
	}
	j := placeJSON{Request: plainRequest(), Fixed: -1, Flow: e.Flow, Candidates: e.Candidates}
	j.Name, j.Request.Model = e.RequestID, e.Model
	f, err := j.frame()
	f.hook = abi.HookPlace
	return f, err
}

// frame checks a place frame and numbers its engines.
func (j *placeJSON) frame() (Frame, error) {
	f := Frame{frameHead: j.frameHead, place: &abi.PlaceFacts{
		Request: j.Request.facts(), Fixed: j.Fixed, Sequence: j.Sequence, Random: j.Random,
	}}
	var err error
	if f.place.Flow, err = flowNamed(j.Flow); err != nil {
		return f, err
	}
	numbers := map[string]uint32{}
	for row, c := range j.Candidates {
		fact := c.Facts
		role, ok := abi.ParseRole(fact.Role)
		if !ok {
			return f, fmt.Errorf("candidates[%d].facts.role: %q is not prefill, decode or both", row, fact.Role)
		}
		pair, err := pairNamed(fact.Pair)
		if err != nil {
			return f, fmt.Errorf("candidates[%d].facts.pair: %w", row, err)
		}
		home, ok := abi.ParseRole(fact.Home)
		if !ok && fact.Home != "" && fact.Home != "none" {
			return f, fmt.Errorf("candidates[%d].facts.home: %q is not none, prefill, decode or both", row, fact.Home)
		}
		adapter, ok := abi.ParseAdapterState(fact.Adapter)
		if !ok {
			return f, fmt.Errorf("candidates[%d].facts.adapter: %q is not unknown, running, free, waiting or full", row, fact.Adapter)
		}
		f.place.Adapters = f.place.Adapters || adapter != abi.AdapterUnknown
		number := c.Instance
		if number == 0 {
			if numbers[c.Engine] == 0 {
				numbers[c.Engine] = uint32(len(numbers)) + 1
			}
			number = numbers[c.Engine]
		}
		f.place.Candidates = append(f.place.Candidates, abi.Candidate{
			Instance: number, Rank: c.Rank, Group: fact.Group, Roles: role, Trial: fact.Trial, Pair: pair, Home: home,
			Requests: fact.Requests, Tokens: fact.Tokens, Queued: fact.Queued,
			BlocksGPU: fact.BlocksGPU, BlocksCPU: fact.BlocksCPU, BlocksDisk: fact.BlocksDisk,
			BlockTokens: fact.BlockTokens, Usage: fact.Usage, TokenMicros: fact.TokenMicros,
			RecentTokens: fact.RecentTokens, RecentRequests: fact.RecentRequests, Busy: fact.Busy, Adapter: adapter,
		})
		detail, err := fact.detail()
		if err != nil {
			return f, fmt.Errorf("candidates[%d].facts.labels: %w", row, err)
		}
		f.place.Details = append(f.place.Details, detail)
		name := c.Engine
		if name == "" {
			name = fmt.Sprint(number)
		}
		f.names = append(f.names, fmt.Sprintf("%s/%d", name, c.Rank))
	}
	rows := int32(len(j.Candidates))
	if j.Fixed < -1 || j.Fixed >= rows {
		return f, fmt.Errorf("fixed: %d is not a row of %d candidates", j.Fixed, rows)
	}
	for i, p := range j.Pairs {
		state, err := pairNamed(p.State)
		if err != nil {
			return f, fmt.Errorf("pairs[%d].state: %w", i, err)
		}
		if min(p.Prefill, p.Decode) < 0 || max(p.Prefill, p.Decode) >= rows {
			return f, fmt.Errorf("pairs[%d]: %d and %d are not rows of %d candidates", i, p.Prefill, p.Decode, rows)
		}
		f.place.Pairs = append(f.place.Pairs, abi.Pair{Prefill: p.Prefill, Decode: p.Decode, State: state, TransferMicros: p.TransferMicros})
	}
	return f, nil
}

func readMint(text json.RawMessage) (Frame, error) {
	var j mintJSON
	if err := strictly(text, &j); err != nil {
		return Frame{}, err
	}
	return Frame{frameHead: j.frameHead, mint: &abi.MintFacts{
		UnixMilli: j.UnixMS, Node: j.Node, Worker: j.Worker, Counter: j.Counter,
	}}, nil
}

func readRetain(text json.RawMessage) (Frame, error) {
	j := retainJSON{Most: 450_000}
	if err := strictly(text, &j); err != nil {
		return Frame{}, err
	}
	return Frame{frameHead: j.frameHead, retain: &abi.RetainFacts{
		ToolCall: j.ToolCall, MostMillis: j.Most, Tokens: j.Tokens, Usage: j.Usage,
		Conversation: abi.Gaps(j.Conversation), Tools: abi.Gaps(j.Tools), All: abi.Gaps(j.All),
	}}, nil
}

func readEvict(text json.RawMessage) (Frame, error) {
	var j evictJSON
	if err := strictly(text, &j); err != nil {
		return Frame{}, err
	}
	f := Frame{frameHead: j.frameHead, evict: &abi.EvictFacts{
		Saturated: j.Saturated, Priority: j.Priority, Class: abi.LabelID(j.Class), Tenant: abi.LabelID(j.Tenant),
		PromptTokens: j.PromptTokens, Remaining: j.Remaining,
	}}
	if n := len(j.Running); n < 1 || n > abi.MaxEvictable {
		return f, fmt.Errorf("running: %d requests, a frame has 1 to %d", n, abi.MaxEvictable)
	}
	for i, r := range j.Running {
		phase, err := phaseNamed(r.Phase)
		if err != nil {
			return f, fmt.Errorf("running[%d].%w", i, err)
		}
		f.evict.Running = append(f.evict.Running, abi.Evictable{
			Priority: r.Priority, Class: abi.LabelID(r.Class), Tenant: abi.LabelID(r.Tenant), Phase: phase,
			Prefill: r.Prefill, Decode: r.Decode, AgeMicros: r.Age, PromptTokens: r.PromptTokens, Sent: r.Sent,
		})
	}
	return f, nil
}

func readLeg(text json.RawMessage) (Frame, error) {
	j := legJSON{Request: plainRequest(), Event: "send", Attempt: 1, Flow: abi.FlowPrefillFirst.String()}
	if err := strictly(text, &j); err != nil {
		return Frame{}, err
	}
	f := Frame{frameHead: j.frameHead, leg: &abi.LegFacts{
		Request: j.Request.facts(), Attempt: j.Attempt, Left: j.Left, Instance: j.Instance, Rank: j.Rank,
		Partner: j.Partner, PartRank: j.PartRank, ID: j.DisaggID, Engine: j.Engine,
		Status: j.Status, Elapsed: j.Elapsed, Reason: j.Reason,
	}}
	switch j.Event {
	case "send":
	case "failed":
		f.leg.Event = abi.LegFailed
	default:
		return f, fmt.Errorf("event: %q is not send or failed", j.Event)
	}
	var err error
	if f.leg.Flow, err = flowNamed(j.Flow); err != nil {
		return f, err
	}
	f.leg.Phase, err = phaseNamed(j.Phase)
	return f, err
}

func readFinish(text json.RawMessage) (Frame, error) {
	j := finishJSON{Request: plainRequest(), Outcome: "ok", Flow: abi.FlowPrefillFirst.String(), Status: 200,
		Attempts: 1, PromptTokens: -1, CachedTokens: -1, OutputTokens: -1}
	if err := strictly(text, &j); err != nil {
		return Frame{}, err
	}
	f := Frame{frameHead: j.frameHead, finish: &abi.FinishFacts{
		Request: j.Request.facts(), Status: j.Status, Prefill: j.Prefill, PrefillRank: j.PrefillRank,
		Decode: j.Decode, DecodeRank: j.DecodeRank, ID: j.DisaggID, Attempts: j.Attempts,
		Placed: j.Placed, FirstByte: j.FirstByte, Total: j.Total,
		PromptTokens: j.PromptTokens, CachedTokens: j.CachedTokens, OutputTokens: j.OutputTokens, Reason: j.Reason,
	}}
	var err error
	if f.finish.Flow, err = flowNamed(j.Flow); err != nil {
		return f, err
	}
	if f.finish.Failed, err = phaseNamed(j.Failed); err != nil {
		return f, err
	}
	f.finish.Outcome, err = outcomeNamed(j.Outcome)
	return f, err
}

// outcomes are named as in the label of pdproxy_exchanges_total.
var outcomes = map[string]abi.Outcome{
	"": abi.OutcomeNone, "ok": abi.OutcomeOK, "client_error": abi.OutcomeClientError, "engine_error": abi.OutcomeEngineError,
	"timeout": abi.OutcomeTimeout, "cancelled": abi.OutcomeCancelled, "broken": abi.OutcomeBroken,
	"shed": abi.OutcomeShed, "no_target": abi.OutcomeNoTarget, "internal": abi.OutcomeInternal,
}

func outcomeNamed(s string) (abi.Outcome, error) {
	o, ok := outcomes[s]
	if !ok {
		return o, fmt.Errorf("outcome: %q is not an outcome of pdproxy_exchanges_total", s)
	}
	return o, nil
}

func flowNamed(s string) (abi.Flow, error) {
	for f := abi.FlowAggregated; f < abi.FlowReject; f++ {
		if f.String() == s {
			return f, nil
		}
	}
	return abi.FlowNone, fmt.Errorf("flow: %q is not aggregated, prefill_first, concurrent or decode_first", s)
}

func phaseNamed(s string) (abi.Phase, error) {
	for _, p := range []abi.Phase{abi.PhaseNone, abi.Prefill, abi.Decode} {
		if s == p.String() || s == "" && p == abi.PhaseNone {
			return p, nil
		}
	}
	return abi.PhaseNone, fmt.Errorf("phase: %q is not prefill, decode or none", s)
}

func pairNamed(s string) (abi.PairState, error) {
	for p := abi.PairUnknown; p <= abi.PairBroken; p++ {
		if s == p.String() || s == "" && p == abi.PairUnknown {
			return p, nil
		}
	}
	return abi.PairUnknown, fmt.Errorf("%q is not unknown, warming, ready or broken", s)
}
