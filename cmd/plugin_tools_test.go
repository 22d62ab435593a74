package cmd

import (
	"bytes"
	"encoding/json"
	"go/format"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/plugins/trial"
)

// must runs a command line that must end with code.
func must(t *testing.T, code int, args ...string) (stdout, stderr string) {
	t.Helper()
	got, stdout, stderr := run(args...)
	if got != code {
		t.Fatalf("pdproxy %s: exit %d, want %d\n%s%s", strings.Join(args, " "), got, code, stdout, stderr)
	}
	return stdout, stderr
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func unmarshal(t *testing.T, text string, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), into); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
}

func repository(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// checkSource checks the formatting of a new plugin's source.
func checkSource(t *testing.T, dir string) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	for _, name := range names {
		source, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if formatted, err := format.Source(source); err != nil || !bytes.Equal(formatted, source) {
			t.Errorf("%s is not formatted by gofmt: %v", name, err)
		}
	}
}

// TestNewPolicy makes, builds and tests a policy in an empty folder, without a network
// and without pdproxy's sources. conformance/plugins does so with every kind and language.
func TestNewPolicy(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "my-policy")
	t.Setenv("GOFLAGS", "-mod=mod")
	t.Setenv("GOPROXY", "off")
	stdout, _ := must(t, exit.OK, "plugin", "new", dir)
	if want := "README.md, frames.json, go.mod, main.go, main_test.go, pdproxy/\n"; !strings.Contains(stdout, want) {
		t.Errorf("no %q in %s", want, stdout)
	}
	must(t, exit.Usage, "plugin", "new", dir) // the folder exists already
	checkSource(t, dir)
	must(t, exit.OK, "plugin", "build", dir)
	module := filepath.Join(dir, "my-policy.wasm")

	var results []trial.Result
	stdout, _ = must(t, exit.OK, "plugin", "test", "--json", module, filepath.Join(dir, "frames.json"))
	unmarshal(t, stdout, &results)
	if len(results) != 3 {
		t.Fatalf("got %d results", len(results))
	}
	for _, r := range results {
		if r.Error != "" || r.US <= 0 || r.Decision == nil || r.Hook != "place" {
			t.Errorf("result %+v", r)
		}
	}
}

func TestInspect(t *testing.T) {
	for _, tt := range []struct {
		name, module, abi string
		hooks, policies   []string
	}{
		{"one hook, no SDK", "examples/policy-c/policy.wasm", "", []string{"pdproxy_v1_on_place"}, nil},
		{"SDK with all hooks", "", "0.2.1", []string{"pdproxy_v1_on_place"}, []string{"place fewest"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			module := filepath.Join(repository(t), tt.module)
			if tt.module == "" {
				module = filepath.Join(t.TempDir(), "policy.wasm")
				must(t, exit.OK, "plugin", "build", filepath.Join(repository(t), "examples/policy-go"), "-o", module)
			}
			var i trial.Inspection
			stdout, _ := must(t, exit.OK, "plugin", "inspect", "--json", module)
			unmarshal(t, stdout, &i)
			if i.ABI != tt.abi || i.Contract != 1 || !slices.Equal(i.Hooks, tt.hooks) || !slices.Equal(i.Policies, tt.policies) {
				t.Errorf("inspected as %+v", i)
			}
			if i.SizeBytes == 0 || i.CompileMS <= 0 || i.InstantiateUS <= 0 || i.MemoryBytes == 0 {
				t.Errorf("figures are missing: %+v", i)
			}
			for _, key := range []string{"abi", "hooks", "imports", "needs", "size_bytes", "compile_ms", "instantiate_us"} {
				if !strings.Contains(stdout, `"`+key+`": `) || strings.Contains(stdout, `"`+key+`": null`) {
					t.Errorf("%s is missing or null in %s", key, stdout)
				}
			}
		})
	}
	stdout, _ := must(t, exit.OK, "plugin", "inspect", filepath.Join(repository(t), "examples/policy-c/policy.wasm"))
	for _, want := range []string{
		"contract     1\n", "proxy-wasm   none: not a filter\n", "policies     one for each hook, with the name of the plugin\n", "hooks        pdproxy_v1_on_place\n", "imports      none\n", "size         0.9 kB",
	} {
		if !strings.Contains(stdout, want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}
}

const twoRows = `"candidates": [{"engine": "p", "facts": {"role": "prefill"}}, {"engine": "d", "facts": {"role": "decode"}}]`

func TestTrialAsText(t *testing.T) {
	frames := filepath.Join(t.TempDir(), "frames.json")
	writeFile(t, frames, `{"hook": "place", "name": "first", `+twoRows+`} {"hook": "place", "expect": {"decode": "x"}, `+twoRows+`} {"hook": "http"}`)
	module := filepath.Join(repository(t), "examples/policy-c/policy.wasm")
	_, stderr := must(t, exit.Failure, "plugin", "test", module, frames)
	if !strings.Contains(stderr, "a filter needs the marker") {
		t.Errorf("stderr %s", stderr)
	}
	writeFile(t, frames, `{"hook": "place", "name": "first", `+twoRows+`} {"hook": "place", "expect": {"decode": "x"}, `+twoRows+`}`)
	stdout, stderr := must(t, exit.Failure, "plugin", "test", module, frames)
	for _, want := range []string{"FRAME", "first  place", `{"prefill":"p/0","decode":"d/0"`, `expected {"decode": "x"}`} {
		if !strings.Contains(stdout, want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}
	if !strings.Contains(stderr, "1 of 2 frames failed") {
		t.Errorf("stderr %s", stderr)
	}
}

func TestPluginUsage(t *testing.T) {
	dir := t.TempDir()
	text := filepath.Join(dir, "text")
	writeFile(t, text, "text")
	empty := filepath.Join(dir, "empty.wasm")
	writeFile(t, empty, "\x00asm\x01\x00\x00\x00")
	frames := filepath.Join(dir, "frames.json")
	writeFile(t, frames, `[{"hook": "plan"}]`)
	for name, tt := range map[string]struct {
		code   int
		stderr string
		args   []string
	}{
		"no subcommand":      {exit.Usage, "one of new", nil},
		"build nothing":      {exit.Usage, "usage: ", []string{"build"}},
		"build no folder":    {exit.Usage, "pdproxy plugin new", []string{"build", filepath.Join(dir, "absent")}},
		"build a file":       {exit.Usage, "is not a folder", []string{"build", text}},
		"build empty folder": {exit.Failure, "the folder has no plugin", []string{"build", dir}},
		"new bad name":       {exit.Usage, "not a name for a plugin", []string{"new", filepath.Join(dir, "a b")}},
		"new bad kind":       {exit.Usage, "--kind: must be one of", []string{"new", filepath.Join(dir, "a"), "--kind", "cake"}},
		"new bad language":   {exit.Usage, "--lang: must be one of", []string{"new", filepath.Join(dir, "a"), "--lang", "cobol"}},
		"new sdk in C":       {exit.Usage, "filters in Go and Rust", []string{"new", filepath.Join(dir, "a"), "--kind", "filter", "--lang", "c", "--sdk"}},
		"new sdk for leg":    {exit.Usage, "filters in Go and Rust", []string{"new", filepath.Join(dir, "a"), "--kind", "leg", "--sdk"}},
		"new sources in C":   {exit.Usage, "policies in Go", []string{"new", filepath.Join(dir, "a"), "--lang", "c", "--sdk-dir", "."}},
		"new filter of sdk":  {exit.Usage, "stock SDKs", []string{"new", filepath.Join(dir, "a"), "--kind", "filter", "--sdk-dir", "."}},
		"new no sources":     {exit.Usage, "find pdproxy's sources", []string{"new", filepath.Join(dir, "a"), "--sdk-dir", dir}},
		"inspect no file":    {exit.Usage, "absent", []string{"inspect", filepath.Join(dir, "absent")}},
		"inspect text":       {exit.Failure, "the file is not WebAssembly", []string{"inspect", text}},
		"inspect empty":      {exit.Failure, "neither a proxy-wasm marker", []string{"inspect", empty}},
		"test one argument":  {exit.Usage, "usage: ", []string{"test", empty}},
		"test no frames":     {exit.Usage, "frame 0", []string{"test", empty, text}},
		"test bad module":    {exit.Failure, "neither a proxy-wasm marker", []string{"test", empty, frames}},
		"test bad repeat":    {exit.Usage, "--repeat", []string{"test", "--repeat", "0", empty, frames}},
		"test bad level":     {exit.Usage, "--guest-log", []string{"test", "--guest-log", "loud", empty, frames}},
		"test bad upstream":  {exit.Usage, "--upstream u", []string{"test", "--upstream", "u=http://[", empty, frames}},
	} {
		t.Run(name, func(t *testing.T) {
			_, stderr := must(t, tt.code, append([]string{"plugin"}, tt.args...)...)
			if !strings.Contains(stderr, tt.stderr) {
				t.Errorf("stderr %q, want the text %q", stderr, tt.stderr)
			}
		})
	}
}

func TestNewFilter(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "My-Filter")
	must(t, exit.OK, "plugin", "new", "--kind", "filter", dir)
	checkSource(t, dir)
	must(t, exit.OK, "plugin", "build", dir)
	module, frames := filepath.Join(dir, "My-Filter.wasm"), filepath.Join(dir, "frames.json")
	text, err := os.ReadFile(frames)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, frames, string(text)+`{"hook": "http", "expect": {"response": {"status": 403}}}`)
	stdout, stderr := must(t, exit.Failure, "plugin", "test", module, frames)
	for _, want := range []string{"request: POST /v1/completions, 15 bytes; answer: 200, 14 bytes", `expected {"response": {"status": 403}}`} {
		if !strings.Contains(stdout, want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}
	if !strings.Contains(stderr, "1 of 2 frames failed") {
		t.Errorf("stderr %s", stderr)
	}
}

// push prints a result, so it takes --json.
func TestPushAsJSON(t *testing.T) {
	if code, _, errs := run("plugin", "push", "--json", write(t, "text"), "oci://127.0.0.1:1/plugins/x:1"); code != exit.Failure || !strings.Contains(errs, "not WebAssembly") {
		t.Errorf("exit %d: %s", code, errs)
	}
}
