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

// everything is a build that does all that can be asked for, so that the golden
// files do not depend on what this build does.
func everything(string, string) bool { return true }

// little is a build that lacks what a build may lack.
func little(key, value string) bool {
	lacks := []string{"engine.connector=vllm-mooncake", "engine.connector=vllm-moriio", "retry.schedule_style=generation_first",
		"discovery.moriio.listen", "discovery.trtllm.cluster_uri", "discovery.trtllm.metadata_uri", "fleet.workers", "fleet.coordinator"}
	return !slices.Contains(lacks, key) && !slices.Contains(lacks, key+"="+value)
}

// importFile imports an input of testdata by what its name begins with.
func importFile(name string, text []byte, can supports) (Result, error) {
	f := File{Name: filepath.Base(name), Text: text}
	switch kind, _, _ := strings.Cut(f.Name, "-"); kind {
	case "vllm":
		return vllmRouterFor(f, can)
	case "sglang":
		return sglangRouterFor(f, can)
	default:
		return TRTLLM{Disagg: f, RequestTimeout: DefaultRequestTimeout}.importFor(can)
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

// What is made of every input, exactly, with its warnings.
func TestGolden(t *testing.T) {
	for _, name := range inputs(t) {
		t.Run(filepath.Base(name), func(t *testing.T) {
			res, err := importFile(name, read(t, name), everything)
			if err != nil {
				t.Fatal(err)
			}
			base := strings.TrimSuffix(name, filepath.Ext(name))
			golden(t, base+".toml", res.TOML)
			golden(t, base+".warnings", warnings(res.Warnings))
		})
	}
}

// What a build lacks stays in the text as a comment, and is warned of.
func TestWhatABuildLacks(t *testing.T) {
	for _, name := range []string{"testdata/trtllm-cluster.yaml", "testdata/trtllm-metadata.yaml", "testdata/trtllm-multiturn.yaml", "testdata/vllm-mooncake.flags", "testdata/vllm-moriio.flags"} {
		t.Run(filepath.Base(name), func(t *testing.T) {
			all, err := importFile(name, read(t, name), everything)
			if err != nil {
				t.Fatal(err)
			}
			some, err := importFile(name, read(t, name), little)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := config.Parse([]byte(some.TOML)); err != nil {
				t.Error(err)
			}
			if len(some.Warnings) <= len(all.Warnings) || !strings.Contains(warnings(some.Warnings), "this build does not support it") {
				t.Errorf("warnings:\n%s", warnings(some.Warnings))
			}
			// But for the marks the two texts are the same.
			with, without := strings.Split(all.TOML, "\n"), strings.Split(some.TOML, "\n")
			if len(with) != len(without) {
				t.Fatalf("%d lines, %d without", len(with), len(without))
			}
			marked := 0
			for i := range with {
				key, _, _ := strings.Cut(with[i], " #")
				off, isOff := strings.CutPrefix(without[i], "#")
				if with[i] == without[i] {
					continue
				}
				marked++
				if !isOff || !strings.HasPrefix(off, strings.TrimSpace(key)) {
					t.Errorf("line %d: %q, %q without", i+1, with[i], without[i])
				}
			}
			if marked == 0 {
				t.Error("no line is marked")
			}
		})
	}
}

// What this very build prints can be run by it.
func TestResultsParse(t *testing.T) {
	for _, name := range inputs(t) {
		res, err := importFile(name, read(t, name), config.Supports)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if _, err := config.Parse([]byte(res.TOML)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// No secret of an input is in what comes out.
func TestSecretsStayWhereTheyAre(t *testing.T) {
	secrets := []string{"example-not-a-secret", "hf_secret", "sk-very-secret", "secret123", "hunter2"}
	seen := map[string]bool{}
	for _, name := range inputs(t) {
		text := string(read(t, name))
		res, err := importFile(name, []byte(text), everything)
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
		"vllm-a":   "--worker-urls http://user:sk-secret@h:1",
		"vllm-b":   "--api-key sk-secret sk-secret",
		"vllm-c":   "--api-kye sk-secret",
		"vllm-d":   "--port sk-secret --policy sk-secret --kv-connector sk-secret --vllm-pd-disaggregation --prefill sk-secret sk-secret",
		"vllm-e":   "--cache-threshold sk-secret sk-secret 'sk-secret",
		"sglang-a": "--pd-disaggregation --prefill grpc://user:sk-secret@h:1 --decode http://h?key=sk-secret",
		"trtllm-a": "internal_request_auth_key: [sk-secret]\nport: sk-secret\nnum_workers: {sk-secret: 1}",
		"trtllm-b": "context_servers: {urls: ['user:sk-secret@h:1']}",
		"trtllm-c": "disagg_cluster: {cluster_uri: 'etcd://user:sk-secret@h:1'}",
	} {
		_, err := importFile(name, []byte(text), everything)
		if err == nil || strings.Contains(err.Error(), "sk-secret") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
