package cmd

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/pdproxy/pdproxy/abi"
)

// Recorded frames, the second argument of `pdproxy plugin test`: JSON values one
// after the other, each a frame, a list of frames, or what
// `pdproxy explain --json` printed. docs/plugins.md has the fields.

// trialFrame is one recorded call of a hook. Exactly one of the facts is there.
type trialFrame struct {
	frameHead
	hook   abi.Hook
	plan   *abi.PlanFacts
	place  *abi.PlaceFacts
	mint   *abi.MintFacts
	leg    *abi.LegFacts
	finish *abi.FinishFacts
	http   *httpJSON // of a filter, hook is none
	names  []string  // of the rows of place, "engine/rank"
}

// frameHead is what every frame may say.
type frameHead struct {
	Name     string          `json:"name"`
	Hook     string          `json:"hook"`
	Policy   string          `json:"policy"` // within the module; "": the hook's only one
	Sequence uint64          `json:"sequence"`
	Random   uint64          `json:"random"`
	UnixMS   int64           `json:"unix_ms"`
	Seed     uint32          `json:"seed"`
	Expect   json.RawMessage `json:"expect"`
}

func (h *frameHead) header() abi.Header {
	return abi.Header{Sequence: h.Sequence, Random: h.Random, UnixMilli: h.UnixMS, Seed: h.Seed}
}

type requestJSON struct {
	PromptTokens int64  `json:"prompt_tokens"`
	MaxTokens    int64  `json:"max_tokens"`
	N            int64  `json:"n"`
	Stream       bool   `json:"stream"`
	PairBroken   bool   `json:"pair_broken"`
	Model        string `json:"model"`
	Conversation string `json:"conversation"`
	Prompt       string `json:"prompt"`
	Turn         int32  `json:"turn"`
}

// plainRequest is a request that says nothing.
func plainRequest() requestJSON { return requestJSON{MaxTokens: -1, N: 1} }

func (r requestJSON) facts() abi.RequestFacts { return abi.RequestFacts(r) }

type planJSON struct {
	frameHead
	Request        requestJSON `json:"request"`
	PrefillTargets int32       `json:"prefill_targets"`
	DecodeTargets  int32       `json:"decode_targets"`
	BothTargets    int32       `json:"both_targets"`

	PrefillCached  int64   `json:"prefill_cached"`
	BothCached     int64   `json:"both_cached"`
	PrefillQueued  int64   `json:"prefill_queued"`
	BothQueued     int64   `json:"both_queued"`
	PrefillMicros  float32 `json:"prefill_us"`
	BothMicros     float32 `json:"both_us"`
	TransferMicros float32 `json:"transfer_us"`
	HandoverMicros float32 `json:"handover_us"`
}

type placeJSON struct {
	frameHead
	Request    requestJSON     `json:"request"`
	Flow       string          `json:"flow"`
	Fixed      int32           `json:"fixed"`
	Candidates []candidateJSON `json:"candidates"`
	Pairs      []pairJSON      `json:"pairs"`
}

// candidateJSON is a candidate as explain shows it; its score is the policy's of
// then, and not read.
type candidateJSON struct {
	Engine   string        `json:"engine"`
	Instance uint32        `json:"instance"` // 0: by engine, in the order of their names' first rows
	Rank     int32         `json:"rank"`
	Score    *float64      `json:"score"`
	Facts    candidateFact `json:"facts"`
}

type candidateFact struct {
	Role       string `json:"role"`
	Group      uint32 `json:"group"`
	Requests   int32  `json:"requests"`
	Tokens     int64  `json:"tokens"`
	Queued     int64  `json:"queued"`
	Trial      bool   `json:"trial"`
	Home       string `json:"home"`
	Pair       string `json:"pair"`
	BlocksGPU  uint32 `json:"blocks_gpu"`
	BlocksCPU  uint32 `json:"blocks_cpu"`
	BlocksDisk uint32 `json:"blocks_disk"`

	BlockTokens uint32  `json:"block_tokens"`
	Usage       float32 `json:"usage"`
	TokenMicros float32 `json:"token_us"`
}

type pairJSON struct {
	Prefill int32  `json:"prefill"`
	Decode  int32  `json:"decode"`
	State   string `json:"state"`

	TransferMicros float32 `json:"transfer_us"`
}

type mintJSON struct {
	frameHead
	Node    uint8  `json:"node"`
	Worker  uint8  `json:"worker"`
	Counter uint16 `json:"counter"`
}

type legJSON struct {
	frameHead
	Request  requestJSON `json:"request"`
	Event    string      `json:"event"`
	Phase    string      `json:"phase"`
	Flow     string      `json:"flow"`
	Attempt  uint32      `json:"attempt"`
	Left     uint32      `json:"left"`
	Engine   string      `json:"engine"`
	Instance uint32      `json:"instance"`
	Rank     int32       `json:"rank"`
	Partner  uint32      `json:"partner"`
	PartRank int32       `json:"partner_rank"`
	DisaggID uint64      `json:"disagg_id"`
	Status   uint32      `json:"status"`
	Elapsed  int64       `json:"elapsed_us"`
	Reason   string      `json:"reason"`
}

type finishJSON struct {
	frameHead
	Request      requestJSON `json:"request"`
	Outcome      string      `json:"outcome"`
	Flow         string      `json:"flow"`
	Failed       string      `json:"failed"`
	Status       uint32      `json:"status"`
	Prefill      uint32      `json:"prefill"`
	PrefillRank  int32       `json:"prefill_rank"`
	Decode       uint32      `json:"decode"`
	DecodeRank   int32       `json:"decode_rank"`
	DisaggID     uint64      `json:"disagg_id"`
	Attempts     uint32      `json:"attempts"`
	Placed       int64       `json:"placed_us"`
	FirstByte    int64       `json:"first_byte_us"`
	Total        int64       `json:"total_us"`
	PromptTokens int64       `json:"prompt_tokens"`
	CachedTokens int64       `json:"cached_tokens"`
	OutputTokens int64       `json:"output_tokens"`
	Reason       string      `json:"reason"`
}

// readFrames reads a file of recorded frames.
func readFrames(r io.Reader) ([]trialFrame, error) {
	var frames []trialFrame
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

// readFrame reads one frame, or the frame that an explanation tells of.
func readFrame(text json.RawMessage) (trialFrame, error) {
	var head struct {
		Hook      string `json:"hook"`
		RequestID string `json:"request_id"`
	}
	if err := json.Unmarshal(text, &head); err != nil {
		return trialFrame{}, err
	}
	if head.Hook == "" && head.RequestID != "" {
		return explainedFrame(text)
	}
	if head.Hook == httpHook {
		return readHTTP(text)
	}
	hook, ok := abi.ParseHook(head.Hook)
	if !ok {
		return trialFrame{}, fmt.Errorf("hook: %q is not plan, place, mint, leg, finish or http", head.Hook)
	}
	f, err := map[abi.Hook]func(json.RawMessage) (trialFrame, error){
		abi.HookPlan: readPlan, abi.HookPlace: readPlace, abi.HookMint: readMint,
		abi.HookLeg: readLeg, abi.HookFinish: readFinish,
	}[hook](text)
	f.hook = hook
	return f, err
}

// strictly decodes and refuses keys that the frame does not have.
func strictly(text json.RawMessage, into any) error {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	return dec.Decode(into)
}

func readPlan(text json.RawMessage) (trialFrame, error) {
	j := planJSON{Request: plainRequest()}
	if err := strictly(text, &j); err != nil {
		return trialFrame{}, err
	}
	return trialFrame{frameHead: j.frameHead, plan: &abi.PlanFacts{
		Request: j.Request.facts(), PrefillTargets: j.PrefillTargets, DecodeTargets: j.DecodeTargets, BothTargets: j.BothTargets,
		PrefillCached: j.PrefillCached, BothCached: j.BothCached, PrefillQueued: j.PrefillQueued, BothQueued: j.BothQueued,
		PrefillMicros: j.PrefillMicros, BothMicros: j.BothMicros, TransferMicros: j.TransferMicros, HandoverMicros: j.HandoverMicros,
	}}, nil
}

func readPlace(text json.RawMessage) (trialFrame, error) {
	j := placeJSON{Request: plainRequest(), Fixed: -1, Flow: abi.FlowPrefillFirst.String()}
	if err := strictly(text, &j); err != nil {
		return trialFrame{}, err
	}
	return j.frame()
}

// explainedFrame is the place frame of an explanation. What it does not tell of
// the request is as in a frame that does not say it.
func explainedFrame(text json.RawMessage) (trialFrame, error) {
	var e struct {
		RequestID  string          `json:"request_id"`
		Flow       string          `json:"flow"`
		Model      string          `json:"model"`
		Candidates []candidateJSON `json:"candidates"`
	}
	if err := json.Unmarshal(text, &e); err != nil {
		return trialFrame{}, err
	}
	j := placeJSON{Request: plainRequest(), Fixed: -1, Flow: e.Flow, Candidates: e.Candidates}
	j.Name, j.Request.Model = e.RequestID, e.Model
	f, err := j.frame()
	f.hook = abi.HookPlace
	return f, err
}

// frame checks a place frame and numbers its engines.
func (j *placeJSON) frame() (trialFrame, error) {
	f := trialFrame{frameHead: j.frameHead, place: &abi.PlaceFacts{
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
		})
		name := c.Engine
		if name == "" {
			name = fmt.Sprint(number)
		}
		f.names = append(f.names, fmt.Sprintf("%s/%d", name, c.Rank))
	}
	rows := int32(len(j.Candidates))
	if j.Fixed < -1 || j.Fixed >= rows {
		return f, fmt.Errorf("fixed: %d is no row of %d candidates", j.Fixed, rows)
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

func readMint(text json.RawMessage) (trialFrame, error) {
	var j mintJSON
	if err := strictly(text, &j); err != nil {
		return trialFrame{}, err
	}
	return trialFrame{frameHead: j.frameHead, mint: &abi.MintFacts{
		UnixMilli: j.UnixMS, Node: j.Node, Worker: j.Worker, Counter: j.Counter,
	}}, nil
}

func readLeg(text json.RawMessage) (trialFrame, error) {
	j := legJSON{Request: plainRequest(), Event: "send", Attempt: 1, Flow: abi.FlowPrefillFirst.String()}
	if err := strictly(text, &j); err != nil {
		return trialFrame{}, err
	}
	f := trialFrame{frameHead: j.frameHead, leg: &abi.LegFacts{
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

func readFinish(text json.RawMessage) (trialFrame, error) {
	j := finishJSON{Request: plainRequest(), Outcome: "ok", Flow: abi.FlowPrefillFirst.String(), Status: 200,
		Attempts: 1, PromptTokens: -1, CachedTokens: -1, OutputTokens: -1}
	if err := strictly(text, &j); err != nil {
		return trialFrame{}, err
	}
	f := trialFrame{frameHead: j.frameHead, finish: &abi.FinishFacts{
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
		return o, fmt.Errorf("outcome: %q is none of pdproxy_exchanges_total", s)
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
