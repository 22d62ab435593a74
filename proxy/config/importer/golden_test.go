package importer

import (
	"flag"
	"os"
	"path/filepath"
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
	default:
		return TRTLLM{Disagg: f, RequestTimeout: DefaultRequestTimeout}.Import()
	}
}

func inputs(t testing.TB) []string {
	var names []string
	for _, pattern := range []string{"testdata/*.yaml", "testdata/*.flags"} {
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
			golden(t, base+".warnings", warnings(res.Warnings))
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
			if strings.Contains(res.TOML+warnings(res.Warnings), s) {
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
