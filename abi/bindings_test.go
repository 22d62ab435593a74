package abi

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
)

// bindings are the structures that guests in C and Rust see, in the order in which
// they use each other. The key of layouts is the table of README.md.
var bindings = []struct{ name, layout string }{
	{"header", "Header 1"}, {"request", "Request 1"}, {"plan", "Plan 1"}, {"place", "Place 1"}, {"candidate", "Place 2"},
	{"pair", "Place 3"}, {"mint", "Mint 1"}, {"leg", "Leg 1"}, {"edit", "Leg 2"}, {"finish", "Finish 1"},
	{"gaps", "Retain 2"}, {"retain", "Retain 1"}, {"evict", "Evict 1"}, {"evictable", "Evict 2"},
	{"identity", "Identity 1"}, {"more", "Details 1"}, {"detail", "Details 2"}, {"prediction", "Predictions 1"}, {"traits", "Traits 1"},
	{"headers", "Headers 1"}, {"declared", "Headers 2"},
	{"score", "Score 1"}, {"asked", "Score 2"}, {"row_score", "Score 3"},
}

// constants are the numbers of the contract, for guests in C and Rust. In Rust a constant
// has the type of the first field that uses it; the constants of an answer are u64.
var constants = []struct {
	name  string
	value uint64
}{
	{"need_prompt", uint64(NeedPrompt)}, {"need_blocks", uint64(NeedBlocks)}, {"need_conversation", uint64(NeedConversation)},
	{"need_ranks", uint64(NeedRanks)}, {"need_pairs", uint64(NeedPairs)}, {"need_details", uint64(NeedDetails)}, {"need_identity", uint64(NeedIdentity)}, {"need_predictions", uint64(NeedPredictions)}, {"need_traits", uint64(NeedTraits)}, {"need_headers", uint64(NeedHeaders)}, {"need_media", uint64(NeedMedia)},
	{"flag_stream", flagStream}, {"flag_pair_broken", flagPairBroken}, {"flag_adapters", flagAdapters},
	{"flag_tool_call", flagToolCall}, {"flag_saturated", flagSaturated}, {"flag_tools", flagTools}, {"flag_images", flagImages}, {"flag_audio", flagAudio}, {"flag_present", flagPresent}, {"flag_cut", flagCut},
	{"role_prefill", uint64(RolePrefill)}, {"role_decode", uint64(RoleDecode)},
	{"flow_aggregated", uint64(FlowAggregated)}, {"flow_prefill_first", uint64(FlowPrefillFirst)},
	{"flow_concurrent", uint64(FlowConcurrent)}, {"flow_decode_first", uint64(FlowDecodeFirst)},
	{"plan_pass", uint64(PlanPass)}, {"plan_aggregate", uint64(PlanAggregate)}, {"plan_disaggregate", uint64(PlanDisaggregate)}, {"plan_reject", uint64(PlanReject)}, {"plan_hold", uint64(PlanHold)},
	{"pair_unknown", uint64(PairUnknown)}, {"pair_warming", uint64(PairWarming)}, {"pair_ready", uint64(PairReady)}, {"pair_broken", uint64(PairBroken)},
	{"adapter_unknown", uint64(AdapterUnknown)}, {"adapter_running", uint64(AdapterRunning)}, {"adapter_free", uint64(AdapterFree)}, {"adapter_waiting", uint64(AdapterWaiting)}, {"adapter_full", uint64(AdapterFull)},
	{"min_disagg_id", MinDisaggID}, {"disagg_epoch_ms", uint64(DisaggEpochMilli)},
	{"leg_send", uint64(LegSend)}, {"leg_failed", uint64(LegFailed)},
	{"phase_prefill", uint64(Prefill)}, {"phase_decode", uint64(Decode)},
	{"leg_pass", uint64(LegPass)}, {"leg_edited", uint64(LegEdited)}, {"leg_retry", uint64(LegRetry)}, {"leg_place_again", uint64(LegPlaceAgain)}, {"leg_give_up", uint64(LegGiveUp)},
	{"full_likelihood", FullLikelihood},
	{"set_header", uint64(EditSetHeader)}, {"add_header", uint64(EditAddHeader)}, {"remove_header", uint64(EditRemoveHeader)},
	{"set_field", uint64(EditSetField)}, {"remove_field", uint64(EditRemoveField)}, {"max_edits", MaxEdits},
	{"out_scored", OutScored}, {"out_low_wins", uint64(LowWins)}, {"out_high_wins", uint64(HighWins)}, {"out_seconds", uint64(UnitSeconds)},
	{"out_tokens", uint64(UnitTokens)}, {"out_requests", uint64(UnitRequests)}, {"out_blocks", uint64(UnitBlocks)}, {"out_share", uint64(UnitShare)},
	{"score_done", ScoreDone},
}

// constantTypes are the types of constants that are not u64, by the first word.
var constantTypes = map[string]string{
	"flag": "u32", "role": "u8", "flow": "u32", "pair": "u8", "adapter": "u8", "phase": "u8", "disagg": "i64",
	"set": "u32", "add": "u32", "remove": "u32", "max": "u32", "out": "u32",
}

// TestBindings: pdproxy.h and pdproxy.rs have the layouts and the constants of this
// package. With -update the test writes them anew.
func TestBindings(t *testing.T) {
	tables := readTables(t)
	for file, generated := range map[string]string{"pdproxy.h": bindingC(tables), "pdproxy.rs": bindingRust(tables)} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		const begin, end = "/* generated from package abi: */\n", "/* end of the generated part */\n"
		before, rest, ok := bytes.Cut(text, []byte(begin))
		_, after, both := bytes.Cut(rest, []byte(end))
		if !ok || !both {
			t.Fatalf("%s has no generated part", file)
		}
		want := string(before) + begin + generated + end + string(after)
		if want == string(text) {
			continue
		}
		if !*update {
			t.Errorf("%s differs from this package: run go test ./abi -run Bindings -update", file)
		} else if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestAlignment: a guest reads the structures where they lie, so that each begins at a
// multiple of 8 in the frame, and each field at a multiple of its size in the structure.
func TestAlignment(t *testing.T) {
	f := PlaceFacts{Candidates: make([]Candidate, 3), Pairs: make([]Pair, 3), Request: RequestFacts{Model: "odd"}}
	frame := AppendPlace(nil, &Header{}, &f)
	facts := int(get32(frame, offHeader))
	for name, at := range map[string]int{
		"facts": facts, "rows": int(get32(frame, facts+placeRows)), "pairs": int(get32(frame, facts+placePairs)),
		"row": RowSize, "header": HeaderSize,
	} {
		if at%8 != 0 {
			t.Errorf("%s: %d", name, at)
		}
	}
	aligns := map[string]int{"u8": 1, "u16": 2, "u32": 4, "i32": 4, "f32": 4, "u64": 8, "i64": 8, "text": 4, "table": 4, "gaps": 4, "place": 8, "identity": 8, "more": 4, "traits": 8, "headers": 4, "": 8}
	for name, table := range readTables(t) {
		for _, f := range table.fields {
			if f.at%aligns[f.kind] != 0 && f.size > 0 {
				t.Errorf("%s: %s at %d", name, f.name, f.at)
			}
		}
	}
}

// member returns the name of a field; reserved bytes need one too.
func member(f layoutField) string {
	if f.name == "reserved" {
		return fmt.Sprintf("reserved_%d", f.at)
	}
	return f.name
}

func bindingC(tables map[string]*layoutTable) string {
	types := map[string]string{
		"u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t", "i32": "int32_t", "f32": "float", "u64": "uint64_t", "i64": "int64_t",
		"text": "pdproxy_text", "table": "pdproxy_table", "gaps": "pdproxy_gaps", "": "pdproxy_request",
		"place": "pdproxy_place", "identity": "pdproxy_identity", "more": "pdproxy_more", "traits": "pdproxy_traits", "headers": "pdproxy_headers",
	}
	var b strings.Builder
	for _, c := range constants {
		fmt.Fprintf(&b, "#define PDPROXY_%s %dULL\n", strings.ToUpper(c.name), c.value)
	}
	for _, s := range bindings {
		fmt.Fprintf(&b, "\ntypedef struct {\n")
		for _, f := range tables[s.layout].fields {
			if f.size > 0 {
				fmt.Fprintf(&b, "\t%s %s;%s\n", types[f.kind], member(f), comment(f))
			}
		}
		fmt.Fprintf(&b, "} pdproxy_%s;\n_Static_assert(sizeof(pdproxy_%s) == %d, \"pdproxy_%s\");\n", s.name, s.name, tables[s.layout].size, s.name)
	}
	return b.String()
}

func bindingRust(tables map[string]*layoutTable) string {
	var b strings.Builder
	for _, c := range constants {
		kind, ok := constantTypes[c.name[:strings.Index(c.name, "_")]]
		if c.name == "leg_send" || c.name == "leg_failed" {
			kind = "u8"
		} else if !ok {
			kind = "u64"
		}
		fmt.Fprintf(&b, "pub const %s: %s = %d;\n", strings.ToUpper(c.name), kind, c.value)
	}
	types := map[string]string{
		"text": "Text", "table": "Table", "gaps": "Gaps", "": "Request",
		"place": "Place", "identity": "Identity", "more": "More", "traits": "Traits", "headers": "Headers",
	}
	for _, s := range bindings {
		name := titled(s.name)
		fmt.Fprintf(&b, "\n#[repr(C)]\npub struct %s {\n", name)
		for _, f := range tables[s.layout].fields {
			kind := f.kind
			if named, ok := types[kind]; ok {
				kind = named
			}
			if f.size > 0 {
				fmt.Fprintf(&b, "    pub %s: %s,%s\n", member(f), kind, strings.Replace(strings.TrimSuffix(comment(f), " */"), "/*", "//", 1))
			}
		}
		fmt.Fprintf(&b, "}\nconst _: () = assert!(core::mem::size_of::<%s>() == %d);\n", name, tables[s.layout].size)
	}
	return b.String()
}

// titled returns the name of a structure in Rust, such as RowScore of row_score.
func titled(name string) (title string) {
	for part := range strings.SplitSeq(name, "_") {
		title += strings.ToUpper(part[:1]) + part[1:]
	}
	return title
}

func comment(f layoutField) string {
	if f.text == "" {
		return ""
	}
	return " /* " + strings.ReplaceAll(f.text, "`", "") + " */"
}
