package importer

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

var update = flag.Bool("update", false, "write the golden files anew")

// importFile imports an input of testdata. The beginning of its name gives the kind.
func importFile(name string, text []byte) (Result, error) {
	f := File{Name: filepath.Base(name), Text: text}
	switch kind, _, _ := strings.Cut(f.Name, "-"); kind {
	case "vllm":
		return VLLMRouter(f)
	case "sglang":
		return SGLangRouter(f)
	case "llmd":
		return LLMD(f)
	case "litellm":
		return LiteLLM(f)
	case "stack":
		return ProductionStack(f)
	case "dynamo":
		return Dynamo(f)
	default:
		return TRTLLM{Disagg: f, RequestTimeout: DefaultRequestTimeout}.Import()
	}
}

func inputs(t testing.TB) []string {
	var names []string
	for _, pattern := range []string{"testdata/*.yaml", "testdata/*.flags", "testdata/public/*.yaml", "testdata/public/*.flags"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, found...)
	}
	if len(names) < 12 {
		t.Fatalf("only %d inputs", len(names))
	}
	return names
}

func read(t testing.TB, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if want := string(read(t, name)); got != want {
		t.Errorf("%s is\n%s\nwant\n%s", name, got, want)
	}
}

// findings returns the warnings of a result, and then what is lost.
func findings(res Result) string {
	text := warnings(res.Warnings)
	for _, f := range res.Lost {
		text += "lost: " + f.String() + "\n"
	}
	return text
}

func warnings(fs []Finding) string {
	var b strings.Builder
	for _, f := range fs {
		b.WriteString(f.String() + "\n")
	}
	return b.String()
}

// The result of every input, and its warnings, equal the golden file exactly.
func TestGolden(t *testing.T) {
	for _, name := range inputs(t) {
		t.Run(filepath.Base(name), func(t *testing.T) {
			res, err := importFile(name, read(t, name))
			if err != nil {
				t.Fatal(err)
			}
			base := strings.TrimSuffix(name, filepath.Ext(name))
			golden(t, base+".toml", res.TOML)
			golden(t, base+".warnings", findings(res))
		})
	}
}

// The proxy accepts every imported configuration.
func TestResultsParse(t *testing.T) {
	for _, name := range inputs(t) {
		res, err := importFile(name, read(t, name))
		if err != nil {
			t.Errorf("%s: importFile(name, read(name)) = %v, want nil", name, err)
			continue
		}
		if _, err := config.Parse([]byte(res.TOML)); err != nil {
			t.Errorf("%s: config.Parse([]byte(res.TOML)) = %v, want nil", name, err)
		}
	}
}

// The tables that an operator uncomments pass config.Parse, and their roles are those of the
// input.
func TestSamplesOfKubernetes(t *testing.T) {
	for name, want := range map[string]string{
		"stack-k8s.flags": "vllm both none", "public/stack-orchestrated.yaml": "first prefill vllm-nixl, second decode vllm-nixl",
		"public/stack-disaggregated.yaml":  "small-first prefill vllm-store, small-second decode vllm-store",
		"public/stack-nested-session.yaml": "small both none", "public/sglang-pd-selectors.flags": "prefill prefill sglang, decode decode sglang",
		"public/llmd-threshold.yaml": "pool both vllm-nixl", "public/llmd-modelservice.yaml": "pool both vllm-nixl",
		"public/dynamo-router-v1beta1.yaml": "secondworker decode vllm-nixl, firstworker prefill vllm-nixl",
		"public/dynamo-sglang.yaml":         "second decode sglang, first prefill sglang",
		"public/dynamo-planner.yaml":        "secondworker decode vllm-nixl, firstworker prefill vllm-nixl",
		"public/dynamo-trtllm.yaml":         "first prefill trtllm, second decode trtllm",
	} {
		res, err := importFile(name, read(t, "testdata/"+name))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var lines []string
		for line := range strings.Lines(res.TOML) {
			if strings.HasPrefix(line, "#") && !strings.HasPrefix(line, "# ") {
				line = line[1:]
			}
			lines = append(lines, line)
		}
		c, err := config.Parse([]byte(strings.Join(lines, "")))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var engines []string
		for _, e := range slices.Concat(c.Discovery.Kubernetes.Engines, c.Discovery.Kubernetes.Pools) {
			engines = append(engines, e.Name+" "+e.Role+" "+e.Connector)
		}
		if got := strings.Join(engines, ", "); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

// The README of the public files names each of them, and no other.
func TestPublicFilesHaveAnOrigin(t *testing.T) {
	readme := string(read(t, "testdata/public/README.md"))
	count := map[string]int{}
	for _, name := range inputs(t) {
		base, public := strings.CutPrefix(name, "testdata/public/")
		if !public {
			continue
		}
		if !strings.Contains(readme, "| `"+base+"` | ") {
			t.Errorf("the README does not name the origin of %s", base)
		}
		kind, _, _ := strings.Cut(base, "-")
		count[kind]++
	}
	for _, kind := range []string{"trtllm", "vllm", "sglang", "stack", "llmd", "dynamo", "litellm"} {
		if count[kind] < 3 {
			t.Errorf("%d public files of %s, want 3", count[kind], kind)
		}
		count[""] += count[kind]
	}
	if rows := strings.Count(readme, "\n| `"); rows != count[""] {
		t.Errorf("the README has %d rows for %d files", rows, count[""])
	}
}

// The output contains no secret of the input.
func TestSecretsStayWhereTheyAre(t *testing.T) {
	secrets := []string{"example-not-a-secret", "hf_secret", "sk-very-secret", "secret123", "hunter2"}
	seen := map[string]bool{}
	for _, name := range inputs(t) {
		text := string(read(t, name))
		res, err := importFile(name, []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range secrets {
			seen[s] = seen[s] || strings.Contains(text, s)
			if strings.Contains(res.TOML+findings(res), s) {
				t.Errorf("%s: %q is in the result", name, s)
			}
		}
	}
	if len(seen) != len(secrets) {
		t.Errorf("only %v were tried", seen)
	}
	for name, text := range map[string]string{
		"vllm-a":    "--worker-urls http://user:sk-secret@h:1",
		"vllm-b":    "--api-key sk-secret sk-secret",
		"vllm-c":    "--api-kye sk-secret",
		"vllm-d":    "--port sk-secret --policy sk-secret --kv-connector sk-secret --vllm-pd-disaggregation --prefill sk-secret sk-secret",
		"vllm-e":    "--cache-threshold sk-secret sk-secret 'sk-secret",
		"sglang-a":  "--pd-disaggregation --prefill grpc://user:sk-secret@h:1 --decode http://h?key=sk-secret",
		"stack-a":   "--routing-logic roundrobin --static-backends http://user:sk-secret@h:1 --port sk-secret",
		"llmd-a":    "--port=sk-secret --kv-connector sk-secret --enable-tls sk-secret",
		"llmd-b":    "port: [sk-secret]\nkv-connector: sk-secret",
		"llmd-c":    "kind: sk-secret\nplugins: [{type: 7, name: sk-secret}]\nflowControl: {maxRequests: sk-secret}",
		"llmd-d":    "plugins: [{type: by-label, parameters: {label: a, validValues: [{sk-secret: 1}]}}, {type: utilization-filter, parameters: {conditions: [{metric: sk-secret, maxValue: sk-secret}]}}, {type: prefix-cache-scorer, parameters: {matchLengthWeight: sk-secret}}]",
		"llmd-e":    "plugins: [{type: queue-scorer}]\nfeatureGates: [{sk-secret: 1}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: sk-secret, weight: sk-secret}]}]\nrequestHandler: {parsers: [{pluginRef: sk-secret}]}",
		"litellm-a": "model_list: [{model_name: m, litellm_params: {model: openai/m, api_base: 'http://user:sk-secret@h:1', api_key: sk-secret}}]",
		"trtllm-a":  "internal_request_auth_key: [sk-secret]\nport: sk-secret\nnum_workers: {sk-secret: 1}",
		"trtllm-b":  "context_servers: {urls: ['user:sk-secret@h:1']}",
		"trtllm-c":  "disagg_cluster: {cluster_uri: 'etcd://user:sk-secret@h:1'}",
	} {
		_, err := importFile(name, []byte(text))
		if err == nil || strings.Contains(err.Error(), "sk-secret") {
			t.Errorf("%s: importFile(name, []byte(text)) = %v", name, err)
		}
	}
}
