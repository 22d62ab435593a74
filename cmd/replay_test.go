package cmd

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/policies"
)

// replayTrace is a short trace. replayFleet are flags of a fleet that is busy
// during it.
const replayTrace = "../internal/replay/testdata/mooncake_300.jsonl"

func replayFleet(args ...string) []string {
	return append([]string{"replay", "--trace", replayTrace, "--prefill", "1", "--ranks", "2", "--decode", "1", "--blocks-per-rank", "300"}, args...)
}

type replayResult struct {
	Trace string           `json:"trace"`
	Ideal float64          `json:"ideal_hit_ratio"`
	Rows  []map[string]any `json:"rows"`
}

func replayJSON(t *testing.T, args ...string) replayResult {
	t.Helper()
	code, out, errs := run(replayFleet(append(args, "--json")...)...)
	if code != exit.OK {
		t.Fatalf("exit %d: %s", code, errs)
	}
	var r replayResult
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatal(err)
	}
	for _, row := range r.Rows {
		if row["fallbacks"] != 0.0 || row["decisions_per_s"].(float64) <= 0 {
			t.Errorf("%v", row)
		}
		delete(row, "decisions_per_s")
	}
	return r
}

// A built-in policy decides the same compiled in, as WebAssembly, and from a
// file. Rows are in the order of the flags.
func TestReplay(t *testing.T) {
	file := filepath.Join(t.TempDir(), "builtin.wasm")
	if err := os.WriteFile(file, policies.Wasm(), 0o600); err != nil {
		t.Fatal(err)
	}
	names := []string{"least_load", "round_robin"}
	natively := replayJSON(t, "--policy", names[0], "--policy", names[1], "--runtime", "native")
	wasm := replayJSON(t, "--policy", names[0], "--policy", names[1])
	files := replayJSON(t, "--policy", file+"/"+names[0], "--policy", file+"/"+names[1])
	if natively.Trace != "mooncake_300.jsonl" || natively.Ideal != 676.0/8490 || len(natively.Rows) != 2 {
		t.Errorf("%+v", natively)
	}
	for i, name := range names {
		if natively.Rows[i]["policy"] != name || files.Rows[i]["policy"] != file+"/"+name {
			t.Errorf("row %d is of %v and %v", i, natively.Rows[i]["policy"], files.Rows[i]["policy"])
		}
		files.Rows[i]["policy"] = name
	}
	if !reflect.DeepEqual(natively, wasm) {
		t.Errorf("natively %v\nas WebAssembly %v", natively, wasm)
	}
	if !reflect.DeepEqual(natively, files) {
		t.Errorf("natively %v\nfrom a file %v", natively, files)
	}
}

func TestReplayWrites(t *testing.T) {
	page := filepath.Join(t.TempDir(), "report.html")
	code, out, errs := run(replayFleet("--trace", replayTrace, "--html", page, "--slo-ttft", "7s", "--slo-itl", "33ms", "--runtime", "native")...)
	if code != exit.OK {
		t.Fatalf("exit %d: %s", code, errs)
	}
	if n := strings.Count(out, "300 requests"); n != 2 {
		t.Errorf("got %d tables", n)
	}
	for _, want := range append(policies.PlaceNames(), "first token within 7.00 s, then 33.0 ms") {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in %s", want, out)
		}
	}
	if html, err := os.ReadFile(page); err != nil || !strings.Contains(string(html), "round_robin") {
		t.Errorf("the page: %v", err)
	}
}

// TestReplayScores: the sets of a configuration place the trace, and the report has what each scorer
// contributed.
func TestReplayScores(t *testing.T) {
	file, page := write(t, "[[scores]]\nname = 'one'\nmodels = ['nobody']\n[[scores.scorer]]\nname = 'prefix'\nweight = 4\n[[scores.scorer]]\nname = 'kv_usage'\n"), filepath.Join(t.TempDir(), "report.html")
	code, out, errs := run(replayFleet("--trace", replayTrace, "--html", page, "--config", file, "--policy", "scores", "--policy", "scores/one", "--runtime", "native")...)
	if code != exit.OK {
		t.Fatalf("exit %d: %s", code, errs)
	}
	for _, want := range []string{
		"scores: the scores of the chosen targets", "prefill     queue       2", "scores/one: the scores of the chosen targets", "prefill    prefix       4", "decode  kv_usage       1",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in %s", want, out)
		}
	}
	if html, err := os.ReadFile(page); err != nil || !strings.Contains(string(html), "Scores of scores/one") {
		t.Errorf("the page: %v", err)
	}
	for name, args := range map[string][]string{
		`--config has no [[scores]] with the name "two"`:                {"--config", file, "--policy", "scores/two"},
		"scores[0].scorer[0].name: no built-in scorer is named \"pre\"": {"--config", write(t, "[[scores]]\nname = 's'\n[[scores.scorer]]\nname = 'pre'\n"), "--policy", "scores"},
		"no such file": {"--config", "/nonexistent.toml", "--policy", "scores"},
	} {
		if code, _, errs := run(replayFleet(append(args, "--trace", replayTrace)...)...); code == exit.OK || !strings.Contains(errs, name) {
			t.Errorf("exit %d: %s, want %s", code, errs, name)
		}
	}
}

// A variant has its own name and requests. The same seed gives the same result.
func TestReplayVariant(t *testing.T) {
	args := []string{"--policy", "round_robin", "--runtime", "native", "--variant"}
	first, again, other := replayJSON(t, append(args, "shifted:1")...), replayJSON(t, append(args, "shifted:1")...), replayJSON(t, append(args, "shifted:2")...)
	if first.Trace != "shifted 1" || other.Trace != "shifted 2" {
		t.Errorf("traces %q and %q", first.Trace, other.Trace)
	}
	if !reflect.DeepEqual(first, again) {
		t.Errorf("the same seed gives %v\nand %v", first, again)
	}
	if reflect.DeepEqual(first.Rows, other.Rows) {
		t.Errorf("another seed gives the same result: %v", first.Rows)
	}
}

func TestReplayRefuses(t *testing.T) {
	model := write(t, "name = 'm'\n")
	for name, tt := range map[string]struct {
		args []string
		code int
		err  string
	}{
		"no trace":        {[]string{"replay"}, exit.Usage, "--trace or --agents is needed"},
		"no such trace":   {[]string{"replay", "--trace", "/nonexistent"}, exit.Usage, "/nonexistent"},
		"not a trace":     {[]string{"replay", "--trace", model}, exit.Usage, "line 1"},
		"two with JSON":   {replayFleet("--trace", replayTrace, "--json"), exit.Usage, "--trace"},
		"no such policy":  {replayFleet("--policy", "best"), exit.Usage, "--policy: must be one of"},
		"no such native":  {replayFleet("--policy", "best", "--runtime", "native"), exit.Usage, "--policy: must be one of"},
		"no such file":    {replayFleet("--policy", "/nonexistent.wasm"), exit.Usage, "--policy /nonexistent.wasm"},
		"no number":       {replayFleet("--param", "kv_aware.patience"), exit.Usage, "POLICY.NAME=NUMBER"},
		"no such param":   {replayFleet("--param", "kv_aware.haste=1"), exit.Usage, "haste"},
		"no such runtime": {replayFleet("--runtime", "java"), exit.Usage, "--runtime"},
		"no such preset":  {replayFleet("--preset", "best"), exit.Usage, "--preset"},
		"no such model":   {replayFleet("--model-file", "/nonexistent"), exit.Usage, "--model-file"},
		"half a model":    {replayFleet("--model-file", model), exit.Usage, "prefill_us_per_token is missing"},
		"no block":        {replayFleet("--block-tokens", "0"), exit.Usage, "--block-tokens"},
		"little memory":   {replayFleet("--blocks-per-rank", "10"), exit.Usage, "ranks of 10"},
		"no such variant": {replayFleet("--variant", "reversed:1"), exit.Usage, "--variant: must be one of"},
		"no seed":         {replayFleet("--variant", "mixed"), exit.Usage, "--variant: \"mixed\" is not KIND:SEED"},
		"no page":         {replayFleet("--html", "/nonexistent/r.html", "--policy", "round_robin", "--runtime", "native"), exit.Usage, "--html: open /nonexistent/r.html"},
		"negative TTFT":   {replayFleet("--slo-ttft", "-1s"), exit.Usage, "--slo-ttft: must not be negative"},
		"negative ITL":    {replayFleet("--slo-itl", "-1s"), exit.Usage, "--slo-itl: must not be negative"},
	} {
		t.Run(name, func(t *testing.T) {
			code, _, errs := run(tt.args...)
			if code != tt.code || !strings.Contains(errs, tt.err) {
				t.Errorf("exit %d: %s", code, errs)
			}
		})
	}
}

// Parameters reach a policy that is compiled in and one in WebAssembly.
func TestReplayParams(t *testing.T) {
	plain := replayJSON(t, "--policy", "kv_aware")
	natively := replayJSON(t, "--policy", "kv_aware", "--param", "kv_aware.queue_weight=0", "--runtime", "native")
	wasm := replayJSON(t, "--policy", "kv_aware", "--param", "kv_aware.queue_weight=0")
	if !reflect.DeepEqual(natively, wasm) || reflect.DeepEqual(plain, wasm) {
		t.Errorf("by default %v\nnatively %v\nas WebAssembly %v", plain, natively, wasm)
	}
}

func TestReplayWarnsOfOtherBlocks(t *testing.T) {
	code, _, errs := run(replayFleet("--block-tokens", "64", "--blocks-per-rank", "4000", "--policy", "round_robin", "--runtime", "native")...)
	if code != exit.OK || !strings.Contains(errs, "--block-tokens") {
		t.Errorf("exit %d: %s", code, errs)
	}
}

// TestReplayAgents: the command compares the retain policies on the same sessions.
func TestReplayAgents(t *testing.T) {
	fleet := []string{"replay", "--agents", "5", "--prefill", "1", "--ranks", "1", "--decode", "1", "--load", "0.3", "--runtime", "native"}
	code, out, errs := run(append(fleet, "--json")...)
	var report struct {
		Sessions, Turns int
		Rows            []struct {
			Retain string
			TTFT   float64        `json:"ttft_p95_ms"`
			Held   float64        `json:"held_block_seconds"`
			Counts map[string]int `json:"results"`
		}
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil || code != exit.OK {
		t.Fatalf("exit %d: %v, %s", code, err, errs)
	}
	if report.Sessions != 5 || len(report.Rows) != len(policies.RetainNames()) {
		t.Fatalf("%+v", report)
	}
	for i, name := range policies.RetainNames() {
		row := report.Rows[i]
		if row.Retain != name || row.TTFT <= 0 || (row.Held == 0) != (name == "none") || row.Counts["freed"] == report.Turns != (name == "none") {
			t.Errorf("row %d: %+v", i, row)
		}
	}
	if code, out, errs = run(append(fleet, "--retain", "likely")...); code != exit.OK || !strings.Contains(out, "likely") || strings.Contains(out, "lease") {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
	for _, args := range [][]string{
		{"--trace", replayTrace}, {"--variant", "shifted:1"}, {"--html", "/nonexistent/r.html"}, {"--slo-ttft", "1s"}, {"--policy", "kv_aware", "--policy", "least_load"}, {"--retain", "forever"},
		{"--retain", "/nonexistent.wasm"}, {"--volatile", "1.5"}, {"--agents", "-1"},
	} {
		if code, _, errs := run(append(fleet, args...)...); code != exit.Usage || !strings.Contains(errs, args[0]) {
			t.Errorf("%v: exit %d, %s", args, code, errs)
		}
	}
	for _, flag := range []string{"--retain=likely", "--volatile=0.5"} {
		if code, _, errs := run("replay", "--trace", replayTrace, flag); code != exit.Usage || !strings.Contains(errs, "needs --turns or --agents") {
			t.Errorf("%s with a trace: exit %d, %s", flag, code, errs)
		}
	}
}

// TestReplayTurns: the command plays the conversations of a trace, without and with the filter, with the policies of a
// module as with built-in ones, and writes a page.
func TestReplayTurns(t *testing.T) {
	file, page := filepath.Join(t.TempDir(), "builtin.wasm"), filepath.Join(t.TempDir(), "report.html")
	if err := os.WriteFile(file, policies.Wasm(), 0o600); err != nil {
		t.Fatal(err)
	}
	type report struct {
		Name  string
		Later int `json:"later_turns"`
		Rows  []map[string]any
	}
	play := func(args ...string) (r report) {
		t.Helper()
		code, out, errs := run(replayFleet(append(args, "--turns", "--load", "0.3", "--json")...)...)
		if err := json.Unmarshal([]byte(out), &r); err != nil || code != exit.OK {
			t.Fatalf("exit %d: %v, %s", code, err, errs)
		}
		return r
	}
	builtin := play("--volatile", "1", "--runtime", "native", "--retain", "lease", "--html", page)
	if builtin.Name != "mooncake_300.jsonl" || builtin.Later == 0 || len(builtin.Rows) != 2 {
		t.Fatalf("%+v", builtin)
	}
	if off, on := builtin.Rows[0], builtin.Rows[1]; off["stable_prefix"] != false || off["pulled_turns"] != 0.0 || on["stable_prefix"] != true || on["pulled_turns"] == 0.0 || on["bytes_to_prefill"].(float64) <= 0 {
		t.Errorf("%+v", builtin.Rows)
	}
	if html, err := os.ReadFile(page); err != nil || !strings.Contains(string(html), "lease, stable_prefix") {
		t.Errorf("the page: %v", err)
	}
	for _, place := range []string{"kv_aware", file + "/kv_aware"} {
		files := play("--volatile", "1", "--retain", file+"/lease", "--policy", place)
		for _, row := range files.Rows {
			if row["retain"] != file+"/lease" {
				t.Errorf("row of %v", row["retain"])
			}
			row["retain"] = "lease"
		}
		if !reflect.DeepEqual(files, builtin) {
			t.Errorf("built in %v\nfrom a file, placed by %s %v", builtin, place, files)
		}
	}
	if rows := play("--variant", "shifted:1", "--runtime", "native").Rows; len(rows) != len(policies.RetainNames()) {
		t.Errorf("rows %v", rows)
	}
	for _, args := range [][]string{
		{"--agents", "3"}, {"--trace", replayTrace, "--json"}, {"--slo-itl", "1s"}, {"--policy", "kv_aware", "--policy", "least_load"}, {"--variant", "mixed"}, {"--volatile", "-1"}, {"--block-tokens", "0"},
	} {
		if code, _, errs := run(replayFleet(append(args, "--turns")...)...); code != exit.Usage || !strings.Contains(errs, args[0]) {
			t.Errorf("%v: exit %d, %s", args, code, errs)
		}
	}
	if code, _, errs := run("replay", "--turns"); code != exit.Usage || !strings.Contains(errs, "--turns: needs --trace") {
		t.Errorf("without a trace: exit %d, %s", code, errs)
	}
}
