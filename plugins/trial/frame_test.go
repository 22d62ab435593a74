package trial

import (
	"reflect"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// TestFrames reads a frame of each hook with every field in it.
func TestFrames(t *testing.T) {
	const request = `"request": {"prompt_tokens": 7, "max_tokens": 8, "n": 2, "stream": true, "pair_broken": true, "shared": 5,
		"model": "m", "conversation": "c", "prompt": "[1]", "turn": 4, "client": 9, "tenant": 8, "class": 7}`
	facts := abi.RequestFacts{PromptTokens: 7, MaxTokens: 8, N: 2, Stream: true, PairBroken: true, Shared: 5, Model: "m", Conversation: "c", Prompt: "[1]", Turn: 4,
		Identity: abi.Identity{Client: 9, Tenant: 8, Class: 7}}
	text := `[
	{"hook": "plan", "name": "a", "policy": "p", "random": 18446744073709551615, "unix_ms": 5, "seed": 6, ` + request + `,
	 "prefill_targets": 1, "decode_targets": 2, "both_targets": 3, "prefill_cached": 4, "both_cached": 5, "prefill_queued": 6, "both_queued": 7,
	 "prefill_us": 0.5, "both_us": 1.5, "transfer_us": 2.5, "handover_us": 3.5},
	{"hook": "place", "sequence": 4, "random": 5, ` + request + `, "flow": "concurrent", "fixed": 0,
	 "candidates": [
	  {"engine": "x", "rank": 1, "score": 2.5, "facts": {"role": "prefill", "group": 3, "requests": 4, "tokens": 5, "queued": 6,
	   "trial": true, "home": "decode", "pair": "ready", "blocks_gpu": 7, "blocks_cpu": 8, "blocks_disk": 9,
	   "block_tokens": 16, "usage": 0.5, "token_us": 12.5, "recent_tokens": 3, "recent_requests": 0.5, "busy": 0.25,
	   "labels": {"zone": "a", "rack": "7"}, "weight": 0.5, "running": 3, "waiting": 0}},
	  {"engine": "y", "facts": {"role": "both"}}, {"engine": "x", "rank": 2, "facts": {"role": "decode"}},
	  {"instance": 77, "facts": {"role": "decode"}}],
	 "pairs": [{"prefill": 0, "decode": 2, "state": "broken", "transfer_us": 0.25}]},
	{"hook": "mint", "unix_ms": 9, "node": 1, "worker": 2, "counter": 3}]
	{"hook": "leg", ` + request + `, "event": "failed", "phase": "prefill", "flow": "decode_first", "attempt": 2, "left": 1,
	 "engine": "e", "instance": 3, "rank": 4, "partner": 5, "partner_rank": 6, "disagg_id": 7, "status": 503, "elapsed_us": 8, "reason": "reset"}
	{"hook": "finish", ` + request + `, "outcome": "broken", "flow": "aggregated", "failed": "decode", "status": 200, "prefill": 1,
	 "prefill_rank": 2, "decode": 3, "decode_rank": 4, "disagg_id": 5, "attempts": 6, "placed_us": 7, "first_byte_us": 8, "total_us": 9,
	 "prompt_tokens": 10, "cached_tokens": 11, "output_tokens": 12, "reason": "late"}
	{"request_id": "r", "flow": "prefill_first", "model": "m2", "outcome": "ok", "candidates": [
	 {"engine": "p", "rank": 0, "score": null, "facts": {"role": "prefill", "requests": 1, "tokens": 2, "trial": false, "colour": "red"}}]}
	{"hook": "retain", "tool_call": true, "tokens": 3, "usage": 0.5, "tools": {"turns": 1, "back": 0.5, "p50_ms": 2, "p75_ms": 3, "p90_ms": 4, "p95_ms": 5, "p99_ms": 6}}
	{"hook": "evict", "saturated": true, "priority": 7, "class": "a", "tenant": "b", "prompt_tokens": 3, "remaining_ms": 5, "running": [{"priority": -1, "class": "c", "tenant": "d", "phase": "decode", "prefill": 1, "decode": 2, "age_us": 4, "prompt_tokens": 5, "sent": 6}]}`
	plain := abi.Detail{Weight: 1, Running: -1, Waiting: -1}
	frames, err := ReadFrames(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	if len(frames) != 8 {
		t.Fatalf("got %d frames", len(frames))
	}
	if got, want := frames[0].header(), (abi.Header{Random: 1<<64 - 1, UnixMilli: 5, Seed: 6}); !reflect.DeepEqual(got, want) {
		t.Errorf("header %+v, want %+v", got, want)
	}
	for i, want := range []any{
		&abi.PlanFacts{Request: facts, PrefillTargets: 1, DecodeTargets: 2, BothTargets: 3, PlanCosts: abi.PlanCosts{
			PrefillCached: 4, BothCached: 5, PrefillQueued: 6, BothQueued: 7,
			PrefillMicros: 0.5, BothMicros: 1.5, TransferMicros: 2.5, HandoverMicros: 3.5}},
		&abi.PlaceFacts{Request: facts, Flow: abi.FlowConcurrent, Sequence: 4, Random: 5,
			Candidates: []abi.Candidate{
				{Instance: 1, Rank: 1, Group: 3, Roles: abi.RolePrefill, Trial: true, Pair: abi.PairReady, Home: abi.RoleDecode, Requests: 4,
					Tokens: 5, Queued: 6, BlocksGPU: 7, BlocksCPU: 8, BlocksDisk: 9, BlockTokens: 16, Usage: 0.5, TokenMicros: 12.5, RecentTokens: 3, RecentRequests: 0.5, Busy: 0.25},
				{Instance: 2, Roles: abi.RoleBoth}, {Instance: 1, Rank: 2, Roles: abi.RoleDecode}, {Instance: 77, Roles: abi.RoleDecode}},
			Details: []abi.Detail{
				{Zone: abi.LabelID("a"), Weight: 0.5, Running: 3, Labels: [abi.OtherLabels]abi.Label{{Name: abi.LabelID("rack"), Value: abi.LabelID("7")}}}, plain, plain, plain},
			Pairs: []abi.Pair{{Prefill: 0, Decode: 2, State: abi.PairBroken, TransferMicros: 0.25}}},
		&abi.MintFacts{UnixMilli: 9, Node: 1, Worker: 2, Counter: 3},
		&abi.LegFacts{Request: facts, Event: abi.LegFailed, Phase: abi.Prefill, Flow: abi.FlowDecodeFirst, Attempt: 2, Left: 1,
			Engine: "e", Instance: 3, Rank: 4, Partner: 5, PartRank: 6, ID: 7, Status: 503, Elapsed: 8, Reason: "reset"},
		&abi.FinishFacts{Request: facts, Outcome: abi.OutcomeBroken, Flow: abi.FlowAggregated, Failed: abi.Decode, Status: 200,
			Prefill: 1, PrefillRank: 2, Decode: 3, DecodeRank: 4, ID: 5, Attempts: 6, Placed: 7, FirstByte: 8, Total: 9,
			PromptTokens: 10, CachedTokens: 11, OutputTokens: 12, Reason: "late"},
		&abi.PlaceFacts{Request: abi.RequestFacts{MaxTokens: -1, N: 1, Model: "m2"}, Flow: abi.FlowPrefillFirst, Fixed: -1,
			Candidates: []abi.Candidate{{Instance: 1, Roles: abi.RolePrefill, Requests: 1, Tokens: 2}}, Details: []abi.Detail{plain}},
		&abi.RetainFacts{ToolCall: true, MostMillis: 450_000, Tokens: 3, Usage: 0.5, Tools: abi.Gaps{Turns: 1, Back: 0.5, P50: 2, P75: 3, P90: 4, P95: 5, P99: 6}},
		&abi.EvictFacts{Saturated: true, Priority: 7, Class: abi.LabelID("a"), Tenant: abi.LabelID("b"), PromptTokens: 3, Remaining: 5, Running: []abi.Evictable{
			{Priority: -1, Class: abi.LabelID("c"), Tenant: abi.LabelID("d"), Phase: abi.Decode, Prefill: 1, Decode: 2, AgeMicros: 4, PromptTokens: 5, Sent: 6}}},
	} {
		f := frames[i]
		got := [...]any{nil, f.plan, f.place, f.mint, f.leg, f.finish, f.retain, f.score, f.evict}[f.hook]
		if !reflect.DeepEqual(got, want) {
			t.Errorf("frame %d:\n%+v\nwant\n%+v", i, got, want)
		}
	}
	if got := frames[1].names; !reflect.DeepEqual(got, []string{"x/1", "y/0", "x/2", "77/0"}) {
		t.Errorf("names %v", got)
	}
}

func TestBadFrames(t *testing.T) {
	for name, tt := range map[string]struct{ text, says string }{
		"nothing":         {" ", "no frame"},
		"no hook":         {`[{"hook": "plan"}, {}]`, "frame 1: hook"},
		"unknown hook":    {`{"hook": "none"}`, "hook"},
		"unknown key":     {`{"hook": "plan", "colour": 1}`, "colour"},
		"key of another":  {`{"hook": "mint", "flow": "concurrent"}`, "flow"},
		"broken JSON":     {`[{"hook": "plan"`, "unexpected EOF"},
		"number":          {`7`, "frame 0"},
		"wrong type":      {`{"hook": "mint", "node": 300}`, "300"},
		"no role":         {`{"hook": "place", "candidates": [{"engine": "x"}]}`, "candidates[0].facts.role"},
		"unknown pair":    {`{"hook": "place", "candidates": [{"facts": {"role": "both", "pair": "x"}}]}`, "candidates[0].facts.pair"},
		"unknown flow":    {`{"hook": "place", "flow": "reject"}`, "flow"},
		"fixed too large": {`{"hook": "place", "fixed": 0}`, "fixed"},
		"pair of no row":  {`{"hook": "place", "pairs": [{"prefill": 0, "decode": 1}]}`, "pairs[0]"},
		"pair state":      {`{"hook": "place", "pairs": [{"state": "x"}]}`, "pairs[0].state"},
		"unknown event":   {`{"hook": "leg", "event": "x"}`, "event"},
		"unknown phase":   {`{"hook": "leg", "phase": "x"}`, "phase"},
		"http path":       {`{"hook": "http", "request": {"path": " "}}`, "invalid character"},
		"http status":     {`{"hook": "http", "response": {"status": 99}}`, "response.status"},
		"http key":        {`{"hook": "http", "flow": "x"}`, "flow"},
		"nothing runs":    {`{"hook": "evict"}`, "running"},
		"running phase":   {`{"hook": "evict", "running": [{"phase": "x"}]}`, "running[0].phase"},
		"unknown outcome": {`{"hook": "finish", "outcome": "x"}`, "outcome"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := ReadFrames(strings.NewReader(tt.text)); err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("got error %v, want the text %q", err, tt.says)
			}
		})
	}
}

// TestOutcomeNames: outcomes have the same names in frames and in metrics.
func TestOutcomeNames(t *testing.T) {
	for o := telemetry.OutcomeOK; o <= telemetry.OutcomeInternal; o++ {
		if got, err := outcomeNamed(o.String()); err != nil || got != abi.Outcome(o) {
			t.Errorf("%s is %d, want %d (%v)", o, got, o, err)
		}
	}
}

func FuzzFrames(f *testing.F) {
	f.Add(`[{"hook": "plan"}]`)
	f.Add(`{"hook": "place", "fixed": 0, ` + twoRows + `}`)
	f.Add(`{"request_id": "r", "flow": "aggregated", ` + twoRows + `}`)
	f.Add(`{"hook": "leg", "event": "failed"} {"hook": "finish"} {"hook": "mint"}`)
	f.Add(`{"hook": "http", "request": {"method": "GET", "path": "/?a=b", "headers": {"a": "b"}, "body": "x"}}`)
	f.Fuzz(func(t *testing.T, text string) {
		frames, err := ReadFrames(strings.NewReader(text))
		for i := range frames {
			if frames[i].http != nil {
				continue
			}
			h := frames[i].header()
			var back abi.Header
			if hook, ok := abi.DecodeHeader(frames[i].encode(&h), &back); !ok || hook != frames[i].hook || err != nil {
				t.Errorf("frame %d does not survive its encoding", i)
			}
		}
	})
}
