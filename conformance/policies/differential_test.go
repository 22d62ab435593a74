package policies

import (
	"bytes"
	"compress/gzip"
	"flag"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies"
)

var update = flag.Bool("update", false, "write the module that was built from the sources into the policies folder")

// TestModuleIsItsSource builds the module of the built-in policies and compares
// it with the embedded one, byte for byte. Another version of Go than that which
// built it gives other bytes: then the two are compared by what they decide.
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
	differential(t, run(t, built), 10000)
}

func write(t *testing.T, wasm []byte) {
	var packed bytes.Buffer
	w, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(wasm); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"builtin.wasm.gz": packed.Bytes(), "builtin.toolchain": []byte(runtime.Version() + "\n")} {
		if err := os.WriteFile("../../policies/"+name, content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestNativeAndWasmDecideTheSame draws frames of all shapes, and asks the
// policies that are compiled in and those of the embedded module.
func TestNativeAndWasmDecideTheSame(t *testing.T) {
	frames := 100_000
	if testing.Short() || raceEnabled {
		frames = 10_000
	}
	differential(t, run(t, policies.Wasm()), frames)
}

func differential(t *testing.T, g *guest, frames int) {
	for hook, names := range map[abi.Hook][]string{
		abi.HookPlan: policies.PlanNames(), abi.HookPlace: policies.PlaceNames(), abi.HookMint: policies.MintNames(), abi.HookLeg: nil, abi.HookFinish: nil,
	} {
		if !slices.Equal(g.names[hook], names) {
			t.Fatalf("%v policies of the module: %q, of the table: %q", hook, g.names[hook], names)
		}
	}
	rnd := rand.New(rand.NewPCG(7, uint64(frames)))
	for i := range frames {
		switch i % 8 {
		case 0:
			comparePlan(t, g, rnd)
		case 1:
			compareMint(t, g, rnd)
		default:
			comparePlace(t, g, rnd)
		}
		if t.Failed() {
			t.Fatalf("frame %d", i)
		}
	}
}

func comparePlan(t *testing.T, g *guest, rnd *rand.Rand) {
	f := &abi.PlanFacts{
		Request:        drawRequest(rnd),
		PrefillTargets: rnd.Int32N(3), DecodeTargets: rnd.Int32N(3), BothTargets: rnd.Int32N(3),
	}
	for i, name := range policies.PlanNames() {
		native, _ := policies.Plan(name)
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

func comparePlace(t *testing.T, g *guest, rnd *rand.Rand) {
	f := drawPlace(rnd)
	i := rnd.IntN(len(policies.PlaceNames()))
	name := policies.PlaceNames()[i]
	native, _ := policies.Place(name)
	if got, want := g.place(&abi.Header{Policy: uint32(i)}, f), native(f); got != want {
		t.Errorf("%s of %+v: %+v as Wasm, %+v compiled in", name, f, got, want)
	}
}

func drawRequest(rnd *rand.Rand) abi.RequestFacts {
	return abi.RequestFacts{
		PromptTokens: rnd.Int64N(1 << 20), MaxTokens: rnd.Int64N(4096) - 1, N: rnd.Int64N(4), Stream: rnd.IntN(2) == 0, PairBroken: rnd.IntN(4) == 0,
		Model: "abcdefghijklmnop"[:rnd.IntN(17)], Turn: rnd.Int32N(4),
	}
}

// drawPlace draws 8 to 64 rows: of few groups and instances or of many, at rest
// or busy or equal, of one role or mixed, with a fixed prefill or none.
func drawPlace(rnd *rand.Rand) *abi.PlaceFacts {
	f := &abi.PlaceFacts{
		Request: drawRequest(rnd), Flow: abi.FlowAggregated + abi.Flow(rnd.IntN(4)), Fixed: -1, Sequence: rnd.Uint64() >> rnd.IntN(64), Random: rnd.Uint64(),
		Candidates: make([]abi.Candidate, 8+rnd.IntN(57)),
	}
	groups, instances, ranks, loads, trials := 1+rnd.IntN(4), 1+rnd.IntN(16), 1+rnd.IntN(8), rnd.IntN(4), rnd.IntN(3)
	for i := range f.Candidates {
		c := &f.Candidates[i]
		*c = abi.Candidate{
			Instance: uint32(1 + rnd.IntN(instances)), Rank: int32(rnd.IntN(ranks)), Group: uint32(1 + rnd.IntN(groups)),
			Roles: abi.Role(1 + rnd.IntN(3)), Trial: trials > 0 && rnd.IntN(4) == 0, Pair: abi.PairState(rnd.IntN(4)), Home: abi.Role(max(0, rnd.IntN(8)-4)),
			BlocksGPU: rnd.Uint32N(100), BlocksCPU: rnd.Uint32N(100), BlocksDisk: rnd.Uint32N(100), BlockTokens: []uint32{0, 16, 512}[rnd.IntN(3)],
			Queued: rnd.Int64N(1 << 20), Usage: float32(rnd.IntN(3)) / 2, TokenMicros: float32(rnd.IntN(3)) * 50,
			RecentTokens: float32(rnd.IntN(3)) * 1e5, RecentRequests: float32(rnd.IntN(3)) * 20,
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
	if i := rnd.IntN(len(f.Candidates)); rnd.IntN(4) == 0 && f.Candidates[i].Roles&abi.RolePrefill != 0 {
		f.Fixed = int32(i)
	}
	for range rnd.IntN(3) {
		f.Pairs = append(f.Pairs, abi.Pair{Prefill: rnd.Int32N(8), Decode: rnd.Int32N(8), State: abi.PairState(rnd.IntN(4)), TransferMicros: float32(rnd.IntN(3))})
	}
	return f
}
