package cmd

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/quickstart"
)

func TestQuickstart(t *testing.T) {
	full := t.TempDir()
	if err := os.WriteFile(filepath.Join(full, "mine"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		args           []string
		code           int
		stdout, stderr string
	}{
		"list":              {nil, exit.OK, "trtllm-generation-first", ""},
		"list as JSON":      {[]string{"--json"}, exit.OK, `"connector": "sglang"`, ""},
		"help":              {[]string{"--help"}, exit.OK, "--prefill", ""},
		"help of one":       {[]string{"sglang", "--help"}, exit.OK, "--host", ""},
		"one":               {[]string{"vllm-nixl"}, exit.OK, "VLLM_NIXL_SIDE_CHANNEL_PORT=5601", ""},
		"counts":            {[]string{"vllm-nixl", "--prefill", "2"}, exit.OK, "--port 8101", ""},
		"hosts":             {[]string{"vllm-nixl", "--host", "10.0.0.5,10.0.0.6"}, exit.OK, "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.6", ""},
		"typo":              {[]string{"vllm-nixll"}, exit.Usage, "", `found "vllm-nixll", did you mean vllm-nixl?`},
		"short name":        {[]string{"mooncake"}, exit.Usage, "", "did you mean vllm-mooncake?"},
		"retired":           {[]string{"vllm-p2p-nccl"}, exit.Usage, "", `quickstart: the command "vllm-p2p-nccl" is retired: vLLM removed P2pNcclConnector in June 2026; use "vllm-nixl"`},
		"unknown":           {[]string{"kubernetes"}, exit.Usage, "", `must be one of "sglang", "trtllm", `},
		"bad count":         {[]string{"vllm-nixl", "--decode", "99"}, exit.Usage, "", "--decode: want 1 to 32 engines, found 99"},
		"no engines":        {[]string{"vllm-nixl", "--prefill", "0"}, exit.Usage, "", "--prefill: want 1 to 32 engines, found 0"},
		"bad host":          {[]string{"vllm-nixl", "--host", "gpu1"}, exit.Usage, "", `--host: want IPv4 addresses`},
		"no name":           {[]string{"--prefill", "2", "--out", full}, exit.Usage, "", "quickstart: which quickstart do you mean with --out --prefill? Name one of vllm-nixl, "},
		"no name with JSON": {[]string{"--json", "--tp=4"}, exit.Usage, "", "--tp? Name one of "},
		"two names":         {[]string{"vllm-nixl", "sglang"}, exit.Usage, "", "sglang"},
		"full folder":       {[]string{"vllm-nixl", "--out", full}, exit.Usage, "", "--out: the folder " + full + " is not empty; --force overwrites its files"},
		"no folder":         {[]string{"vllm-nixl", "--out", filepath.Join(full, "mine")}, exit.Usage, "", "--out: "},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := run(append([]string{"quickstart"}, tt.args...)...)
			if code != tt.code {
				t.Errorf("exit %d, want %d: %s", code, tt.code, stderr)
			}
			if !strings.Contains(stdout, tt.stdout) || !strings.Contains(stderr, tt.stderr) {
				t.Errorf("stdout %q, stderr %q", stdout, stderr)
			}
		})
	}
}

// TestQuickstartFolder writes each quickstart into a folder, and checks its configuration
// with the command that users run.
func TestQuickstartFolder(t *testing.T) {
	for _, s := range quickstart.List() {
		t.Run(s.Name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "new", "folder")
			code, stdout, stderr := run("quickstart", s.Name, "--decode", "2", "--out", dir)
			if code != exit.OK || !strings.Contains(stderr, programName()+" check "+filepath.Join(dir, "config.toml")+"\n") {
				t.Fatalf("exit %d: %s", code, stderr)
			}
			for path := range strings.Lines(stdout) {
				info, err := os.Stat(strings.TrimSpace(path))
				if err != nil {
					t.Error(err)
				} else if runs := info.Mode()&0o111 != 0; runs != strings.HasSuffix(info.Name(), ".sh") {
					t.Errorf("%s has the mode %v", info.Name(), info.Mode())
				}
			}
			for _, name := range []string{"prefill-0.sh", "decode-0.sh", "decode-1.sh"} {
				if !strings.Contains(stdout, filepath.Join(dir, name)) {
					t.Errorf("no %s in %q", name, stdout)
				}
			}
			// A second run changes nothing without --force, and leaves the user's own files.
			file, own := filepath.Join(dir, "docker-compose.yaml"), filepath.Join(dir, "notes.txt")
			for _, path := range []string{file, own} {
				if err := os.WriteFile(path, []byte("mine"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			for _, tt := range []struct {
				force string
				code  int
				kept  bool
			}{{"--force=false", exit.Usage, true}, {"--force", exit.OK, false}} {
				code, _, stderr := run("quickstart", s.Name, "--decode", "2", "--out", dir, tt.force)
				text, err := os.ReadFile(file)
				if kept := string(text) == "mine"; code != tt.code || err != nil || kept != tt.kept {
					t.Errorf("%s: exit %d, %s: kept %v, %v", tt.force, code, stderr, kept, err)
				}
				if text, err := os.ReadFile(own); string(text) != "mine" {
					t.Errorf("%s: the user's file: %q, %v", tt.force, text, err)
				}
			}
			if code, stdout, stderr := run("check", filepath.Join(dir, "config.toml")); code != exit.OK || strings.Contains(stderr, "warning") {
				t.Errorf("check: exit %d, %q, %q", code, stdout, stderr)
			}
		})
	}
}

func TestQuickstartAsJSON(t *testing.T) {
	_, stdout, _ := run("quickstart", "vllm-nixl", "--json")
	var plan quickstart.Plan
	if err := json.Unmarshal([]byte(stdout), &plan); err != nil {
		t.Fatal(err)
	}
	if len(plan.Engines) != 2 || plan.Engines[0].Command[0] != "vllm" || plan.Config == "" {
		t.Errorf("%+v", plan)
	}
}
