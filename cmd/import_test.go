package cmd

import (
	"bytes"
	"encoding/json"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/config"
)

const imports = "../proxy/config/importer/testdata/"

func TestImport(t *testing.T) {
	badYAML, badFlags := write(t, "port: 1\nport: 2\n"), write(t, "--port \\\n  x\n")
	for name, tt := range map[string]struct {
		args           []string
		code           int
		stdout, stderr string
	}{
		"help":                  {[]string{"import", "--help"}, exit.OK, "sglang-router", ""},
		"help of trtllm":        {[]string{"import", "trtllm", "--help"}, exit.OK, "disagg_config.yaml", ""},
		"alone":                 {[]string{"import"}, exit.OK, "production-stack", ""},
		"unknown router":        {[]string{"import", "nginx", badYAML}, exit.Usage, "", "nginx"},
		"no file":               {[]string{"import", "vllm-router"}, exit.Usage, "", "import vllm-router: which FLAGFILE?"},
		"missing file":          {[]string{"import", "trtllm", "/nonexistent.yaml"}, exit.Usage, "", "nonexistent"},
		"bad YAML":              {[]string{"import", "trtllm", badYAML}, exit.Usage, "", badYAML + ": line 2: port: is given twice"},
		"bad flags":             {[]string{"import", "sglang-router", badFlags}, exit.Usage, "", badFlags + ": line 1: --port: want a whole number"},
		"trtllm":                {[]string{"import", "trtllm", imports + "trtllm-static.yaml"}, exit.OK, `url = "http://p0.lab:7001"`, ""},
		"request time-out":      {[]string{"import", "trtllm", "-r", "42", imports + "trtllm-static.yaml"}, exit.OK, `prefill = "42s"`, ""},
		"bad time-out":          {[]string{"import", "trtllm", "-r", "0", imports + "trtllm-static.yaml"}, exit.Usage, "", "--request-timeout"},
		"metadata":              {[]string{"import", "trtllm", imports + "trtllm-static.yaml", "-m", imports + "trtllm-metadata.yaml"}, exit.OK, `"etcd://etcd.lab:2379"`, "line 4: refersh_interval: "},
		"metadata second":       {[]string{"import", "trtllm", imports + "trtllm-static.yaml", imports + "trtllm-metadata.yaml"}, exit.OK, `"etcd://etcd.lab:2379"`, "line 4: refersh_interval: "},
		"metadata twice":        {[]string{"import", "trtllm", "-m", badYAML, badYAML, badYAML}, exit.Usage, "", "twice"},
		"missing metadata":      {[]string{"import", "trtllm", badYAML, "/nonexistent.yaml"}, exit.Usage, "", "nonexistent"},
		"vllm-router":           {[]string{"import", "vllm-router", "--force", imports + "vllm-regular.flags"}, exit.OK, "ranks = 8", "warning: " + imports + "vllm-regular.flags: line 11: --api-key: "},
		"values":                {[]string{"import", "production-stack", imports + "public/stack-disaggregated.yaml"}, exit.OK, `#role = "prefill"`, "remove the # of their lines"},
		"manifest":              {[]string{"import", "production-stack", imports + "public/stack-orchestrated.yaml"}, exit.OK, `#connector = "vllm-nixl"`, "line 59: --service-discovery"},
		"threshold 0":           {[]string{"import", "llm-d", imports + "public/llmd-threshold.yaml"}, exit.OK, `plan = "always"`, "comments"},
		"dynamo":                {[]string{"import", "dynamo", imports + "public/dynamo-trtllm.yaml"}, exit.OK, `place = "kv_aware"`, "no HTTP API"},
		"lost":                  {[]string{"import", "litellm", imports + "public/litellm-tiers.yaml"}, exit.Usage, "", "litellm-tiers.yaml: line 18: general_settings.master_key: clients of the result need no key"},
		"forced":                {[]string{"import", "--force", "litellm", imports + "public/litellm-tiers.yaml"}, exit.OK, `#keys_file = "keys"`, "left out: " + imports + "public/litellm-tiers.yaml: line 18: general_settings.master_key"},
		"forced afterwards":     {[]string{"import", "litellm", imports + "public/litellm-tiers.yaml", "--force"}, exit.OK, `model = "small-1.7b"`, "left out: "},
		"force of nothing":      {[]string{"import", "trtllm", "--force", imports + "trtllm-static.yaml"}, exit.OK, `url = "http://p0.lab:7001"`, ""},
		"no force for mistakes": {[]string{"import", "--force", "trtllm", badYAML}, exit.Usage, "", badYAML + ": line 2: port: is given twice"},
		"llm-d sidecar":         {[]string{"import", "llm-d", imports + "llmd-sidecar.flags"}, exit.OK, `local = "https://localhost:8200"`, "no remote engine"},
		"llmd":                  {[]string{"import", "llmd", imports + "llmd-picker-pd.yaml"}, exit.OK, `place = "scores"`, "line 17: plugin load, headroom: "},
		"llm-d picker":          {[]string{"import", "llm-d", imports + "llmd-picker-pd.yaml"}, exit.OK, `plan = "pd_auto"`, "role both"},
		"litellm":               {[]string{"import", "litellm", imports + "litellm-config.yaml", "--force"}, exit.OK, `url = "http://10.0.0.6:8000"`, "azure"},
		"production-stack":      {[]string{"import", "production-stack", imports + "stack-disaggregated.flags"}, exit.OK, `role = "prefill"`, "vllm-store"},
		"sglang-router":         {[]string{"import", "sglang-router", imports + "sglang-pd.flags"}, exit.OK, "bootstrap_port = 9001", "warning: "},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := run(tt.args...)
			if code != tt.code {
				t.Errorf("exit %d, want %d: %s", code, tt.code, stderr)
			}
			if !strings.Contains(stdout, tt.stdout) || !strings.Contains(stderr, tt.stderr) {
				t.Errorf("stdout %q, stderr %q", stdout, stderr)
			}
		})
	}
}

func TestImportAsJSON(t *testing.T) {
	var res struct {
		TOML                     string
		Warnings, Problems, Lost []struct {
			File, Key, Message string
			Line               int
		}
	}
	code, stdout, stderr := run("import", "trtllm", "--json", imports+"trtllm-multiturn.yaml")
	if err := json.Unmarshal([]byte(stdout), &res); err != nil {
		t.Fatal(err)
	}
	if _, err := config.Parse([]byte(res.TOML)); err != nil || code != exit.OK || stderr != "" || len(res.Warnings) == 0 || res.Problems == nil {
		t.Errorf("exit %d, %v, %+v, stderr %q", code, err, res, stderr)
	}
	code, stdout, _ = run("import", "litellm", "--json", imports+"public/litellm-tiers.yaml")
	if err := json.Unmarshal([]byte(stdout), &res); err != nil {
		t.Fatal(err)
	}
	if code != exit.Usage || res.TOML != "" || len(res.Problems) != 1 || res.Problems[0].Key != "general_settings.master_key" || res.Problems[0].Line != 18 {
		t.Errorf("exit %d, %+v", code, res)
	}
	code, stdout, _ = run("import", "litellm", "--json", "--force", imports+"public/litellm-tiers.yaml")
	if err := json.Unmarshal([]byte(stdout), &res); err != nil {
		t.Fatal(err)
	}
	if code != exit.OK || res.TOML == "" || len(res.Problems) != 0 || len(res.Lost) != 1 {
		t.Errorf("exit %d, %+v", code, res)
	}
	code, stdout, _ = run("import", "vllm-router", "--json", write(t, "--port x"))
	if err := json.Unmarshal([]byte(stdout), &res); err != nil {
		t.Fatal(err)
	}
	if code != exit.Usage || res.TOML != "" || len(res.Problems) != 1 || res.Problems[0].Line != 1 || res.Problems[0].Key != "--port" {
		t.Errorf("exit %d, %+v", code, res)
	}
}

// fullDisk is a writer that always fails.
type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestImportThatCannotBePrinted(t *testing.T) {
	for _, args := range [][]string{{"import", "trtllm"}, {"import", "trtllm", "--json"}} {
		var stderr bytes.Buffer
		if code := Main(append(args, imports+"trtllm-static.yaml"), fullDisk{}, &stderr); code != exit.Failure {
			t.Errorf("%v: exit %d: %s", args, code, stderr.String())
		}
	}
}

// The printed configuration is valid: check also starts its policies with their
// parameters.
func TestImportedConfigurationsCheck(t *testing.T) {
	routers := map[string]string{"trtllm": "trtllm", "vllm": "vllm-router", "sglang": "sglang-router", "stack": "production-stack",
		"llmd": "llm-d", "dynamo": "dynamo", "litellm": "litellm"}
	names, err := filepath.Glob(imports + "public/*.*")
	if err != nil || len(names) < 90 {
		t.Fatalf("%d files, %v", len(names), err)
	}
	for _, name := range []string{"trtllm-kv.yaml", "trtllm-multiturn.yaml", "vllm-regular.flags", "vllm-mooncake.flags", "sglang-pd.flags",
		"llmd-picker-pd.yaml", "llmd-types.yaml", "stack-disaggregated.flags", "litellm-config.yaml"} {
		names = append(names, imports+name)
	}
	for _, name := range names {
		kind, _, _ := strings.Cut(filepath.Base(name), "-")
		if ext := filepath.Ext(name); ext != ".yaml" && ext != ".flags" {
			continue
		}
		code, stdout, stderr := run("import", "--force", routers[kind], name)
		if code != exit.OK {
			t.Errorf("%s: exit %d: %s", name, code, stderr)
			continue
		}
		if code, _, stderr = run("check", write(t, stdout)); code != exit.OK {
			t.Errorf("%s: exit %d: %s", name, code, stderr)
		}
	}
}
