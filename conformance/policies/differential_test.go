package policies

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies"
)

var update = flag.Bool("update", false, "write the module that was built from the sources into the policies folder")

// TestModuleIsItsSource builds the module of the built-in policies and compares
// it with the embedded one, byte for byte. Another version of Go gives other
// bytes; then the test compares the decisions of both.
func TestModuleIsItsSource(t *testing.T) {
	built := buildGo(t, "../../policies/wasm")
	if *update {
		write(t, built)
		return
	}
	if bytes.Equal(built, policies.Wasm()) {
		return
	}
	if runtime.Version() == policies.Toolchain() {
		t.Errorf("the embedded module (%d bytes) is not that of the sources (%d bytes): run make policies", len(policies.Wasm()), len(built))
		return
	}
	t.Logf("the embedded module was built by %s, this is %s: behaviour is compared, not bytes", policies.Toolchain(), runtime.Version())
	differential(t, run(t, built), defaults(t), 10000)
}

func write(t *testing.T, wasm []byte) {
	for name, content := range map[string][]byte{"builtin.wasm": wasm, "builtin.toolchain": []byte(runtime.Version() + "\n")} {
		if err := os.WriteFile("../../policies/"+name, content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestNativeAndWasmDecideTheSame draws frames of all shapes, and compares the
// decisions of the compiled-in policies and of the embedded module.
func TestNativeAndWasmDecideTheSame(t *testing.T) {
	frames := 100_000
	if testing.Short() || raceEnabled {
		frames = 10_000
	}
	differential(t, run(t, policies.Wasm()), defaults(t), frames)
}

// TestGuardedDecidesTheSame is the same with the checks of modules that are not trusted.
func TestGuardedDecidesTheSame(t *testing.T) {
	differential(t, runGuarded(t, policies.Wasm()), defaults(t), 10_000)
}

// params change each policy that has any.
var params = policies.Params{
	"pd_auto": {"both_token_micros": 101.5, "margin": 0.25}, "conversation": {"overload_tokens": 1000, "skip_factor": 1.5},
	"kv_aware": {"patience": 3.7, "late_seconds": 0.3, "late_weight": 7.1, "lora_load_seconds": 0.0123, "label_micros.rack": 77_777.7}, "pair_aware": {"unknown_micros": 0.1, "size_spread": 100, "label_micros.zone": 12_345.6, "label_micros.revision": 0.7, "lora_wait_seconds": 1.7},
	"trtllm_kv_cache_aware": {"max_batch_size": 7}, "sglang_cache_aware": {"balance_abs_threshold": 3}, "dynamo_cost": {"decode_active_request_weight": 3.3},
	"slo_aware": {"ttft_seconds": 1.5, "late_share": 0.2, "margin": 2},
}

// TestParametersHold: the module is configured with the text of the parameters.
func TestParametersHold(t *testing.T) {
	frames := 30_000
	if testing.Short() || raceEnabled {
		frames = 3000
	}
	set, err := policies.New(params)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{log: func(m string) { t.Errorf("log line of the guest: %s", m) }, config: params.Text()}
	differential(t, start(t, policies.Wasm(), w), set, frames)
}

// TestNeedsOfPolicies: the module reports the needs of each policy, also those that
// the parameters of a policy add.
func TestNeedsOfPolicies(t *testing.T) {
	sameNeeds(t, nil)
	for _, name := range []string{"kv_aware", "pair_aware", "slo_aware"} {
		sameNeeds(t, policies.Params{name: {"label_micros.zone": 1}})
	}
}

func sameNeeds(t *testing.T, params policies.Params) {
	set, err := policies.New(params)
	if err != nil {
		t.Fatal(err)
	}
	g := start(t, policies.Wasm(), &world{log: func(m string) { t.Errorf("log line of the guest: %s", m) }, config: params.Text()})
	text, ok, err := g.vm.Text(context.Background(), abi.ExportPolicyNeeds)
	if !ok || err != nil {
		t.Fatal(ok, err)
	}
	want := ""
	for _, hook := range []struct {
		abi.Hook
		names []string
	}{{abi.HookPlan, policies.PlanNames()}, {abi.HookPlace, policies.PlaceNames()}, {abi.HookMint, policies.MintNames()}, {abi.HookRetain, policies.RetainNames()}, {abi.HookEvict, policies.EvictNames()}} {
		for _, name := range hook.names {
			if n := set.Needs(name); n != 0 {
				want += fmt.Sprintf("%s %s %d\n", hook, name, n)
			}
		}
	}
	if text != want || params["kv_aware"] == nil && !strings.Contains(text, "place kv_aware 6\n") {
		t.Errorf("needs\n%swant\n%s", text, want)
	}
}

func differential(t *testing.T, g *guest, set *policies.Set, frames int) {
	for hook, names := range map[abi.Hook][]string{
		abi.HookPlan: policies.PlanNames(), abi.HookPlace: policies.PlaceNames(), abi.HookMint: policies.MintNames(), abi.HookLeg: nil, abi.HookFinish: nil, abi.HookRetain: policies.RetainNames(), abi.HookEvict: policies.EvictNames(),
	} {
		if !slices.Equal(g.names[hook], names) {
			t.Fatalf("%v policies of the module: %q, of the table: %q", hook, g.names[hook], names)
		}
	}
	rnd := rand.New(rand.NewPCG(7, uint64(frames)))
	for i := range frames {
		switch i % 8 {
		case 0:
			comparePlan(t, g, set, rnd)
		case 1:
			compareMint(t, g, rnd)
		case 2:
			compareRetain(t, g, set, rnd)
			compareEvict(t, g, set, rnd)
		default:
			comparePlace(t, g, set, rnd)
		}
		if t.Failed() {
			t.Fatalf("frame %d", i)
		}
	}
}

func defaults(t *testing.T) *policies.Set {
	set, err := policies.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

func comparePlan(t *testing.T, g *guest, set *policies.Set, rnd *rand.Rand) {
	f := &abi.PlanFacts{
		Request:        drawRequest(rnd),
		PrefillTargets: rnd.Int32N(3), DecodeTargets: rnd.Int32N(3), BothTargets: rnd.Int32N(3),
		PlanCosts: abi.PlanCosts{
			PrefillCached: rnd.Int64N(1 << rnd.IntN(20)), BothCached: rnd.Int64N(1 << rnd.IntN(20)),
			PrefillQueued: rnd.Int64N(1 << rnd.IntN(20)), BothQueued: rnd.Int64N(1 << rnd.IntN(20)),
			PrefillMicros: drawMicros(rnd), BothMicros: drawMicros(rnd), TransferMicros: drawMicros(rnd) / 20, HandoverMicros: 100 * drawMicros(rnd),
		},
	}
	f.Request.PromptTokens >>= rnd.IntN(20)
	for i, name := range policies.PlanNames() {
		native, _ := set.Plan(name)
		want := abi.PlanAnswer{Decision: native(f)}
		if got, ok := abi.UnpackPlan(g.plan(&abi.Header{Policy: uint32(i)}, f)); got != want || !ok {
			t.Errorf("%s of %+v: %+v as Wasm, %+v compiled in", name, f, got, want)
		}
	}
}

func compareMint(t *testing.T, g *guest, rnd *rand.Rand) {
	f := &abi.MintFacts{UnixMilli: abi.DisaggEpochMilli + rnd.Int64N(1<<40), Node: uint8(rnd.Uint32()), Worker: uint8(rnd.Uint32()), Counter: uint16(rnd.Uint32())}
	for i, name := range policies.MintNames() {
		native, _ := policies.Mint(name)
		if got, want := g.mint(&abi.Header{Policy: uint32(i)}, f), native(f); got != want {
			t.Errorf("%s of %+v: %d as Wasm, %d compiled in", name, f, got, want)
		}
	}
}

func compareRetain(t *testing.T, g *guest, set *policies.Set, rnd *rand.Rand) {
	gaps := func() (d abi.Gaps) {
		if rnd.IntN(3) > 0 {
			d = abi.Gaps{Turns: 40 * rnd.Float32(), Back: rnd.Float32(), P50: 2000 * rnd.Float32()}
			d.P75 = d.P50 + 2000*rnd.Float32()
			d.P90, d.P95, d.P99 = 2*d.P75, 3*d.P75, 50*d.P75
		}
		return d
	}
	f := &abi.RetainFacts{
		ToolCall: rnd.IntN(2) == 0, MostMillis: rnd.Uint32N(500_000), Tokens: rnd.Int64N(1 << 20), Usage: rnd.Float32(),
		Conversation: gaps(), Tools: gaps(), All: gaps(),
	}
	for i, name := range policies.RetainNames() {
		native, _ := set.Retain(name)
		want := native(f)
		if got, ok := abi.UnpackRetain(g.retain(&abi.Header{Policy: uint32(i)}, f)); got != want || !ok {
			t.Errorf("%s of %+v: %+v as Wasm, %+v compiled in", name, f, got, want)
		}
	}
}

func compareEvict(t *testing.T, g *guest, set *policies.Set, rnd *rand.Rand) {
	f := &abi.EvictFacts{Saturated: rnd.IntN(2) == 0, Priority: rnd.Int32(), PromptTokens: rnd.Int64N(1 << 20), Remaining: rnd.Int64N(1 << 20)}
	for range 1 + rnd.IntN(abi.MaxEvictable) {
		f.Running = append(f.Running, abi.Evictable{Priority: -1 - rnd.Int32N(3), Phase: abi.Phase(rnd.IntN(3)), AgeMicros: rnd.Int64N(100), PromptTokens: rnd.Int64N(1 << 20), Sent: rnd.Int64N(1 << 10)})
	}
	for i, name := range policies.EvictNames() {
		native, _ := set.Evict(name)
		want := native(f)
		if got, ok := abi.UnpackEvict(g.evict(&abi.Header{Policy: uint32(i)}, f), f); got != want || !ok {
			t.Errorf("%s of %+v: %d as Wasm, %d compiled in", name, f, got, want)
		}
	}
}

func comparePlace(t *testing.T, g *guest, set *policies.Set, rnd *rand.Rand) {
	f := drawPlace(rnd)
	f.Request.PromptTokens >>= rnd.IntN(20)
	i := rnd.IntN(len(policies.PlaceNames()))
	name := policies.PlaceNames()[i]
	native, _ := set.Place(name)
	needs := set.Needs(name)
	if needs&abi.NeedPredictions == 0 {
		f.Predictions = nil
	}
	if needs&abi.NeedDetails == 0 {
		f.Details = nil
	}
	got := g.place(&abi.Header{Policy: uint32(i), Layout: abi.Layout{Extended: f.Predictions != nil || f.Details != nil}}, f)
	scored, scale := f.Scored, f.Scale
	scores := make([]float32, len(f.Candidates))
	for i := range f.Candidates {
		scores[i], f.Candidates[i].Score = f.Candidates[i].Score, 0
	}
	f.Scored, f.Scale = false, 0
	if want := native(f); got != want || scored != f.Scored || scale != f.Scale {
		t.Errorf("%s of %+v: %+v as Wasm, %+v compiled in", name, f, got, want)
	}
	for i := range f.Candidates {
		if scored && scores[i] != f.Candidates[i].Score {
			t.Errorf("%s of %+v: row %d has score %v as Wasm, %v compiled in", name, f, i, scores[i], f.Candidates[i].Score)
		}
	}
}

// drawMicros draws a measured time, which is unknown in a third of all cases.
func drawMicros(rnd *rand.Rand) float32 {
	if rnd.IntN(3) == 0 {
		return 0
	}
	return 200 * rnd.Float32()
}

func drawRequest(rnd *rand.Rand) abi.RequestFacts {
	return abi.RequestFacts{
		PromptTokens: rnd.Int64N(1 << 20), MaxTokens: rnd.Int64N(4096) - 1, N: rnd.Int64N(4), Stream: rnd.IntN(2) == 0, PairBroken: rnd.IntN(4) == 0, Shared: uint32(max(0, rnd.IntN(300)-100)),
		Model: "abcdefghijklmnop"[:rnd.IntN(17)], Turn: rnd.Int32N(4),
	}
}

// drawPlace draws 8 to 64 rows: of few or many groups and instances, idle, busy
// or equal, of one role or mixed, with a fixed prefill or none.
func drawPlace(rnd *rand.Rand) *abi.PlaceFacts {
	f := &abi.PlaceFacts{
		Request: drawRequest(rnd), Flow: abi.FlowAggregated + abi.Flow(rnd.IntN(4)), Fixed: -1, Sequence: rnd.Uint64() >> rnd.IntN(64), Random: rnd.Uint64(),
		Candidates: make([]abi.Candidate, 8+rnd.IntN(57)),
	}
	tiers := rnd.Uint32N(2)
	recent, speed := float32(rnd.IntN(2)), float32(rnd.IntN(2)*50)
	groups, instances, ranks, loads, trials := 1+rnd.IntN(4), 1+rnd.IntN(16), 1+rnd.IntN(8), rnd.IntN(4), rnd.IntN(3)
	for i := range f.Candidates {
		c := &f.Candidates[i]
		*c = abi.Candidate{
			Instance: uint32(1 + rnd.IntN(instances)), Rank: int32(rnd.IntN(ranks)), Group: uint32(1 + rnd.IntN(groups)),
			Roles: abi.Role(1 + rnd.IntN(3)), Trial: trials > 0 && rnd.IntN(4) == 0, Pair: abi.PairState(rnd.IntN(4)), Home: abi.Role(max(0, rnd.IntN(8)-4)),
			BlocksGPU: rnd.Uint32N(100), BlocksCPU: tiers * rnd.Uint32N(100), BlocksDisk: tiers * rnd.Uint32N(100), BlockTokens: []uint32{0, 16, 512}[rnd.IntN(3)],
			Queued: rnd.Int64N(1 << rnd.IntN(21)), Usage: max(0, 2*rnd.Float32()-1), TokenMicros: speed + float32(rnd.IntN(3))*50*rnd.Float32(),
			RecentTokens: recent * rnd.Float32() * 1e6, RecentRequests: recent * rnd.Float32() * 100, Busy: recent * rnd.Float32(),
		}
		switch loads {
		case 1:
			c.Requests = rnd.Int32N(3)
			c.Tokens = int64(c.Requests) * 100
		case 2:
			c.Requests, c.Tokens = rnd.Int32N(200), rnd.Int64N(1<<30)
		case 3:
			c.Requests, c.Tokens = 7, 4096
		}
	}
	if f.Adapters = rnd.IntN(3) == 0; f.Adapters {
		for i := range f.Candidates {
			f.Candidates[i].Adapter = abi.AdapterState(rnd.IntN(5))
		}
	}
	if i := rnd.IntN(len(f.Candidates)); rnd.IntN(4) == 0 && f.Candidates[i].Roles&abi.RolePrefill != 0 {
		f.Fixed = int32(i)
	}
	if rnd.IntN(3) > 0 {
		for range f.Candidates {
			wait := rnd.Float32() * 8e6
			f.Predictions = append(f.Predictions, abi.Prediction{Prefill: wait + rnd.Float32()*4e6, PrefillError: rnd.Float32() * 1e5, Wait: wait, Start: rnd.Float32() * 1e5, Token: rnd.Float32() * 6e4})
		}
	}
	if rnd.IntN(3) > 0 {
		for range f.Candidates {
			f.Details = append(f.Details, abi.Detail{
				Zone: rnd.Uint32N(3), Revision: rnd.Uint32N(3), Weight: 1, Labels: [abi.OtherLabels]abi.Label{{Name: abi.LabelID("rack"), Value: rnd.Uint32N(3)}},
			})
		}
	}
	for range rnd.IntN(30) {
		f.Pairs = append(f.Pairs, abi.Pair{Prefill: rnd.Int32N(8), Decode: rnd.Int32N(8), State: abi.PairState(rnd.IntN(4)), TransferMicros: drawMicros(rnd) / 20})
	}
	return f
}
