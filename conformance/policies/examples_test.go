package policies

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
)

// example is one of the policies under examples. All of them make the same
// decisions.
type example struct {
	language string
	folder   string
	compiler []string // a command with its flags; the output is -o FILE, then the source
	source   string   // "" for the Go one
}

func examples() []example {
	return []example{
		{language: "go", folder: "../../examples/policy-go"},
		{
			language: "c", folder: "../../examples/policy-c", source: "policy.c",
			compiler: []string{"clang", "--target=wasm32", "-O2", "-nostdlib", "-Wl,--no-entry", "-Wl,--strip-all"},
		},
		{
			language: "rust", folder: "../../examples/policy-rust", source: "policy.rs",
			compiler: []string{"rustc", "--target", "wasm32-unknown-unknown", "--crate-type", "cdylib", "--edition", "2021", "-O", "-C", "panic=abort", "-C", "strip=symbols"},
		},
	}
}

// prebuilt returns the module in the folder of the source. Go's example has
// none, because it is large and the Go toolchain is always available.
func (e *example) prebuilt(t testing.TB) []byte {
	t.Helper()
	if e.source == "" {
		return buildGo(t, e.folder)
	}
	wasm, err := os.ReadFile(filepath.Join(e.folder, "policy.wasm"))
	if err != nil {
		t.Fatal(err)
	}
	return wasm
}

// built compiles the example. ok is false when its compiler is absent, or has
// no WebAssembly target.
func (e *example) built(t testing.TB) (wasm []byte, ok bool) {
	t.Helper()
	out := filepath.Join(t.TempDir(), "policy.wasm")
	cmd := exec.Command(e.compiler[0], append(e.compiler[1:], "-o", out, filepath.Join(e.folder, e.source))...)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Logf("%s is not built from its source: %v\n%s", e.source, err, text)
		return nil, false
	}
	wasm, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return wasm, true
}

// TestExamples runs the example policies over one set of tables: the modules in
// the repository and, where there is a compiler, those built from the sources.
func TestExamples(t *testing.T) {
	for _, e := range examples() {
		t.Run(e.language, func(t *testing.T) {
			checkExample(t, run(t, e.prebuilt(t)))
			checkExample(t, runGuarded(t, e.prebuilt(t)))
			if e.source == "" {
				return
			}
			if wasm, ok := e.built(t); ok {
				checkExample(t, run(t, wasm))
			}
		})
	}
}

func checkExample(t *testing.T, g *guest) {
	row := func(role abi.Role, group, instance uint32, requests int32) abi.Candidate {
		return abi.Candidate{Roles: role, Group: group, Instance: instance, Requests: requests, Tokens: 1 << 40}
	}
	rows := []abi.Candidate{
		row(abi.RolePrefill, 1, 1, 3), row(abi.RoleBoth, 1, 2, 2), row(abi.RoleDecode, 1, 3, 5), row(abi.RoleDecode, 2, 4, 0), row(abi.RoleDecode, 1, 5, 5),
	}
	for _, tt := range []struct {
		name string
		f    abi.PlaceFacts
		want abi.PlaceDecision
	}{
		{"pair", abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1, Candidates: rows}, abi.PlaceDecision{Prefill: 1, Decode: 2}},
		{"fixed", abi.PlaceFacts{Flow: abi.FlowPrefillFirst, Fixed: 0, Candidates: rows}, abi.PlaceDecision{Prefill: 0, Decode: 1}},
		{"aggregated", abi.PlaceFacts{Flow: abi.FlowAggregated, Fixed: -1, Candidates: rows}, abi.PlaceDecision{Prefill: -1, Decode: 3}},
		{"no decode", abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1, Candidates: rows[:1]}, abi.PlaceDecision{Prefill: 0, Decode: -1}},
		{"no row", abi.PlaceFacts{Flow: abi.FlowConcurrent, Fixed: -1}, abi.PlaceDecision{Prefill: -1, Decode: -1}},
	} {
		tt.f.Request.Model = "m"
		if got := g.place(&abi.Header{}, &tt.f); got != tt.want {
			t.Errorf("%s: got %+v, want %+v", tt.name, got, tt.want)
		}
	}
}

// TestScorerExample: the example of a scorer gives its scores in a module that is trusted and in
// another one, with the prices of its configuration.
func TestScorerExample(t *testing.T) {
	details := make([]abi.Detail, 4)
	for i, zone := range []string{"south", "north", "west", ""} {
		details[i].Zone = abi.LabelID(zone)
	}
	f := &abi.ScoreFacts{
		PlaceFacts: &abi.PlaceFacts{Fixed: -1, Candidates: make([]abi.Candidate, len(details)), Details: details},
		Phases:     abi.RoleDecode, Prefill: -1, Open: []bool{true, true, true, true},
	}
	want := []abi.RowScore{{Score: 0.5, Value: 0.25}, {Score: 1, Value: 0.125}, {}, {}}
	wasm := buildGo(t, "../../examples/scorer-go")
	for _, guarded := range []bool{false, true} {
		w := &world{log: func(m string) { t.Errorf("log line of the guest: %s", m) }, config: "south=0.25 north=0.125"}
		g := startWith(t, wasm, w, host.LoadOptions{Guarded: guarded})
		rows, units := make([]abi.RowScore, len(details)), make([]abi.Scale, 1)
		g.score(&abi.Header{}, f, []uint32{0}, rows, units)
		if !slices.Equal(rows, want) {
			t.Errorf("guarded %v: got %v, want %v", guarded, rows, want)
		}
	}
}
