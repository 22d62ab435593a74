package abi

import (
	"bytes"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the examples of README.md anew")

// layouts are the tables of README.md with the offsets in the code. The key is
// the table's heading and its number below it.
var layouts = map[string]map[string]int{
	"Header 1": {
		"magic": offMagic, "version": offVersion, "hook": offHook, "header_size": offHeader, "total_size": offTotal, "policy": offPolicy,
		"out_flags": offOut, "sequence": offSequence, "random": offRandom, "unix_ms": offUnixMilli, "seed": offSeed, "facts_size": offFacts,
		"edits_offset": offEdits, "edits_size": offEditsLen, "end": HeaderSize,
	},
	"Request 1": {
		"prompt_tokens": reqPromptTokens, "max_tokens": reqMaxTokens, "n": reqN, "flags": reqFlags, "shared": reqShared, "model": reqModel,
		"conversation": reqConversation, "prompt": reqPrompt, "turn": reqTurn, "end": reqSize,
	},
	"Plan 1": {
		"request": 0, "prefill_targets": planPrefill, "decode_targets": planDecode, "both_targets": planBoth,
		"prefill_cached": planPrefillCached, "both_cached": planBothCached, "prefill_queued": planPrefillQueued, "both_queued": planBothQueued,
		"prefill_us": planPrefillMicros, "both_us": planBothMicros, "transfer_us": planTransferMicros, "handover_us": planHandoverMicros,
		"end": planSize,
	},
	"Place 1": {"request": 0, "flow": placeFlow, "fixed": placeFixed, "rows": placeRows, "pairs": placePairs, "end": placeSize},
	"Place 2": {
		"instance": rowInstance, "rank": rowRank, "group": rowGroup, "roles": rowRoles, "trial": rowTrial, "pair": rowPair, "home": rowHome,
		"requests": rowRequests, "score": rowScore, "tokens": rowTokens, "queued": rowQueued, "blocks_gpu": rowBlocksGPU,
		"blocks_cpu": rowBlocksCPU, "blocks_disk": rowBlocksDisk, "block_tokens": rowBlockTokens, "usage": rowUsage, "token_us": rowTokenMicros, "recent_tokens": rowRecentTokens,
		"recent_requests": rowRecentCount, "busy": rowBusy, "adapter": rowAdapter, "media": rowMedia, "media_sent": rowMediaSent, "end": RowSize,
	},
	"Place 3": {"prefill": pairPrefill, "decode": pairDecode, "state": pairState, "transfer_us": pairTransfer, "end": pairSize},
	"Mint 1":  {"unix_ms": mintUnixMilli, "counter": mintCounter, "node": mintNode, "worker": mintWorker, "end": mintSize},
	"Leg 1": {
		"request": 0, "event": legEvent, "phase": legPhase, "flow": legFlow, "attempt": legAttempt, "left": legLeft, "status": legStatus,
		"instance": legInstance, "rank": legRank, "partner": legPartner, "partner_rank": legPartRank, "disagg_id": legID,
		"elapsed_us": legElapsed, "engine": legEngine, "reason": legReason, "end": legSize,
	},
	"Leg 2": {"op": editOp, "name_size": editName, "value_size": editValue, "end": editHeader},
	"Finish 1": {
		"request": 0, "outcome": finOutcome, "flow": finFlow, "failed": finFailed, "status": finStatus, "prefill": finPrefill,
		"prefill_rank": finPrefillRank, "decode": finDecode, "decode_rank": finDecodeRank, "disagg_id": finID, "placed_us": finPlaced,
		"first_byte_us": finFirstByte, "total_us": finTotal, "prompt_tokens": finPromptTokens, "cached_tokens": finCachedTokens,
		"output_tokens": finOutputTokens, "attempts": finAttempts, "reason": finReason, "end": finSize,
	},
	"Retain 1": {
		"flags": retainFlags, "most_ms": retainMost, "tokens": retainTokens, "usage": retainUsage,
		"conversation": retainConversation, "tools": retainTools, "all": retainAll, "end": retainSize,
	},
	"Retain 2": {
		"turns": gapsTurns, "back": gapsBack, "p50_ms": gapsP50, "p75_ms": gapsP75, "p90_ms": gapsP90, "p95_ms": gapsP95, "p99_ms": gapsP99, "end": gapsSize,
	},
	"Score 1": {
		"place": 0, "identity": placeSize, "more": placeSize + identitySize, "traits": scoreTraits, "headers": scoreTraits + traitsSize,
		"phases": scorePhases, "prefill": scorePrefill, "scorers": scoreScorers, "open": scoreOpen, "scores": scoreRows, "end": scoreSize,
	},
	"Score 2": {"scorer": askedIndex, "unit": askedUnit, "end": askedSize},
	"Score 3": {"score": scoredScore, "value": scoredValue, "end": scoredSize},
	"Evict 1": {
		"flags": evictFlags, "priority": evictPriority, "class": evictClass, "tenant": evictTenant, "prompt_tokens": evictPromptTokens,
		"remaining_ms": evictRemaining, "running": evictRunning, "end": evictSize,
	},
	"Evict 2": {
		"priority": runningPriority, "class": runningClass, "tenant": runningTenant, "phase": runningPhase, "prefill": runningPrefill,
		"decode": runningDecode, "age_us": runningAge, "prompt_tokens": runningPromptTokens, "sent": runningSent, "end": runningSize,
	},
	"Identity 1": {"client": identityClient, "tenant": identityTenant, "class": identityClass, "end": identitySize},
	"Details 1":  {"details": moreDetails, "predictions": morePredictions, "end": moreSize},
	"Traits 1":   {"salt": traitsSalt, "remaining_ms": traitsRemaining, "adapter": traitsAdapter, "flags": traitsFlags, "token_limit_us": traitsTokenMicros, "end": traitsSize},
	"Headers 1":  {"headers": headersTable, "end": headersSize},
	"Headers 2":  {"value": headerValue, "flags": headerFlags, "end": headerRow},
	"Predictions 1": {
		"prefill_us": predictPrefill, "prefill_error_us": predictPrefillError, "wait_us": predictWait,
		"start_us": predictStart, "start_error_us": predictStartError, "token_us": predictToken, "token_error_us": predictTokenError, "end": PredictionSize,
	},
	"Details 2": {
		"zone": detailZone, "revision": detailRevision, "hardware": detailHardware, "weight": detailWeight, "running": detailRunning, "waiting": detailWaiting,
		"name_0": detailLabels, "value_0": detailLabels + 4, "name_1": detailLabels + labelSize, "value_1": detailLabels + labelSize + 4,
		"name_2": detailLabels + 2*labelSize, "value_2": detailLabels + 2*labelSize + 4, "name_3": detailLabels + 3*labelSize,
		"value_3": detailLabels + 3*labelSize + 4, "name_4": detailLabels + 4*labelSize, "value_4": detailLabels + 4*labelSize + 4, "context_least": detailContext, "context_most": detailContext + 4, "end": DetailSize,
	},
}

// sizes are the sizes in bytes of the types in README.md. A field without a
// type gives its size directly.
var sizes = map[string]int{"u8": 1, "u16": 2, "u32": 4, "i32": 4, "f32": 4, "u64": 8, "i64": 8, "text": 8, "table": 12, "gaps": gapsSize, "place": placeSize, "identity": identitySize, "more": moreSize, "traits": traitsSize, "headers": headersSize}

// TestREADMELayouts: README.md and the code have the same fields at the same
// offsets, without a gap between them.
func TestREADMELayouts(t *testing.T) {
	found := readTables(t)
	for name, want := range layouts {
		got := map[string]int{"end": found[name].size}
		for _, f := range found[name].fields {
			if f.name != "reserved" && f.name != "" {
				got[f.name] = f.at
			}
		}
		for field, at := range want {
			if got[field] != at {
				t.Errorf("%s: %s is at %d in README.md, at %d in the code", name, field, got[field], at)
			}
		}
		for field := range got {
			if _, ok := want[field]; !ok {
				t.Errorf("%s: %s is in README.md only", name, field)
			}
		}
	}
}

// layoutTable is one table of README.md: its fields in their order, and its size.
type layoutTable struct {
	fields []layoutField
	size   int
}

type layoutField struct {
	at, size         int
	kind, name, text string
}

// readTables returns the tables by their heading and their number below it.
func readTables(t *testing.T) map[string]*layoutTable {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	heading := regexp.MustCompile(`^#+ (.*)$`)
	row := regexp.MustCompile(`^\| (\d+) \| ?(\w*) \| ?(\w*) \|(.*)$`)
	extent := regexp.MustCompile(` (\d+) bytes`)
	found := map[string]*layoutTable{}
	section, number := "", 0
	var table *layoutTable
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		if m := heading.FindStringSubmatch(line); m != nil {
			section, number = m[1], 0
		}
		if strings.HasPrefix(line, "| offset |") {
			number++
			table = new(layoutTable)
			found[fmt.Sprintf("%s %d", section, number)] = table
		}
		m := row.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		at, _ := strconv.Atoi(m[1])
		if at != table.size {
			t.Errorf("%s: %s is at %d, the previous field ends at %d", section, m[3], at, table.size)
		}
		size := sizes[m[2]]
		switch n := extent.FindStringSubmatch(m[4]); {
		case m[3] == "request":
			size = reqSize
		case m[2] == "" && n != nil:
			size, _ = strconv.Atoi(n[1])
		}
		table.size = at + size
		table.fields = append(table.fields, layoutField{at, size, m[2], m[3], strings.TrimSpace(strings.Trim(m[4], " |"))})
	}
	return found
}

// exampleFrames are the frames of the worked examples.
func exampleFrames() map[string][]byte {
	h := &Header{Sequence: 5, Random: 0x1122334455667788, UnixMilli: 1735689600123, Seed: 7}
	r := RequestFacts{PromptTokens: 100, MaxTokens: 16, N: 1, Stream: true, Model: "m"}
	extended := *h
	extended.Extended = true
	known := r
	known.Identity = Identity{Client: 0x0102030405060708, Tenant: 2, Class: 1}
	declaring, told := extended, r
	declaring.Headers = []string{"x-tier", "x-region", "x-trial"}
	told.Headers = []RequestHeader{{Name: "x-tier", Value: "gold", Present: true}, {Name: "x-trial", Present: true}}
	candidates := []Candidate{
		{Instance: 1, Group: 1, Roles: RolePrefill, Requests: 1, Tokens: 40},
		{Instance: 2, Group: 1, Roles: RoleDecode},
		{Instance: 3, Rank: 1, Group: 1, Roles: RoleDecode},
	}
	return map[string][]byte{
		"details": AppendPlace(nil, &extended, &PlaceFacts{
			Request: known, Flow: FlowConcurrent, Fixed: -1, Sequence: h.Sequence, Random: h.Random, Candidates: candidates,
			Details: []Detail{
				{Zone: LabelID("a"), Weight: 1, Running: 2, Waiting: 1},
				{Zone: LabelID("a"), Weight: 1, Running: -1, Waiting: -1},
				{Zone: LabelID("b"), Weight: 0.5, Running: 0, Waiting: 0, Labels: [OtherLabels]Label{{LabelID("rack"), LabelID("7")}}},
			},
		}),
		"headers": AppendPlan(nil, &declaring, &PlanFacts{Request: told, PrefillTargets: 2, DecodeTargets: 3, BothTargets: 1}),
		"plan":    AppendPlan(nil, h, &PlanFacts{Request: r, PrefillTargets: 2, DecodeTargets: 3, BothTargets: 1}),
		"place": AppendPlace(nil, h, &PlaceFacts{
			Request: r, Flow: FlowConcurrent, Fixed: -1, Sequence: h.Sequence, Random: h.Random, Candidates: candidates,
		}),
		"mint": AppendMint(nil, h, &MintFacts{UnixMilli: h.UnixMilli, Node: 1, Worker: 2, Counter: 3}),
		"leg": AppendLeg(nil, h, &LegFacts{
			Request: r, Phase: Decode, Flow: FlowPrefillFirst, Attempt: 1, Left: 2, Instance: 2, Partner: 1, ID: 0x1007b010803, Engine: "d0",
		}),
		"finish": AppendFinish(nil, h, &FinishFacts{
			Request: r, Outcome: OutcomeOK, Flow: FlowPrefillFirst, Status: 200, Prefill: 1, Decode: 2, ID: 0x1007b010803, Attempts: 2,
			Placed: 150, FirstByte: 250_000, Total: 900_000, PromptTokens: 100, CachedTokens: 64, OutputTokens: 16,
		}),
		"score": AppendScore(nil, h, &ScoreFacts{
			PlaceFacts: &PlaceFacts{Request: r, Flow: FlowConcurrent, Fixed: -1, Sequence: h.Sequence, Random: h.Random, Candidates: candidates},
			Phases:     RoleDecode, Prefill: 0, Open: []bool{false, true, true},
		}, []uint32{0, 2}),
		"evict": AppendEvict(nil, h, &EvictFacts{
			Priority: 10, Class: 1, PromptTokens: 100, Remaining: 5000,
			Running: []Evictable{{Priority: -1, Class: 2, Phase: Decode, Prefill: 1, Decode: 2, AgeMicros: 250_000, PromptTokens: 2048, Sent: 16}},
		}),
		"retain": AppendRetain(nil, h, &RetainFacts{
			ToolCall: true, MostMillis: 450_000, Tokens: 2048, Usage: 0.5,
			Tools: Gaps{Turns: 16, Back: 0.75, P50: 250, P75: 500, P90: 1000, P95: 2000, P99: 4000},
			All:   Gaps{Turns: 64, Back: 0.5, P50: 500, P75: 1000, P90: 4000, P95: 8000, P99: 64000},
		}),
	}
}

// TestREADMEExamples: the worked examples are the output of the encoder.
func TestREADMEExamples(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?s)```hex (\\w+)\n(.*?)```")
	frames := exampleFrames()
	if *update {
		text = block.ReplaceAllFunc(text, func(old []byte) []byte {
			name := string(block.FindSubmatch(old)[1])
			return []byte("```hex " + name + "\n" + dump(frames[name]) + "```")
		})
		if err := os.WriteFile("README.md", text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	seen := 0
	for _, m := range block.FindAllSubmatch(text, -1) {
		var got []byte
		for line := range strings.Lines(string(m[2])) {
			at, digits, _ := strings.Cut(strings.TrimSpace(line), " ")
			bytes, err := hex.DecodeString(strings.ReplaceAll(digits, " ", ""))
			if err != nil || at != fmt.Sprintf("%04x", len(got)) {
				t.Fatalf("%s: line %q: %v", m[1], line, err)
			}
			got = append(got, bytes...)
		}
		if want := frames[string(m[1])]; !bytes.Equal(got, want) {
			t.Errorf("%s: README.md has\n% x\nthe encoder writes\n% x", m[1], got, want)
		}
		seen++
	}
	if seen != len(frames) {
		t.Errorf("got %d examples, want %d", seen, len(frames))
	}
}

// dump is hex in lines of 16 bytes, each after its offset.
func dump(frame []byte) string {
	var b strings.Builder
	for at := 0; at < len(frame); at += 16 {
		fmt.Fprintf(&b, "%04x  % x\n", at, frame[at:min(at+16, len(frame))])
	}
	return b.String()
}

// TestREADMENames: README.md describes every export and foreign function of the
// code.
func TestREADMENames(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	names := []string{ExportScratch, ExportPolicies, ExportNeeds, ExportPolicyNeeds, ExportHeaders, ForeignNote, ForeignCounter, ForeignConversationGet, ForeignConversationPut, ForeignPrefixMatch}
	for h := HookPlan; h <= LastHook; h++ {
		names = append(names, h.Export())
	}
	for _, name := range names {
		if !bytes.Contains(text, []byte("| `"+name+"` |")) {
			t.Errorf("%s is not in README.md", name)
		}
	}
	for i, name := range needNames {
		if !bytes.Contains(text, fmt.Appendf(nil, "| %d | %s |", 1<<i, name)) {
			t.Errorf("need %s is not in README.md", name)
		}
	}
}
