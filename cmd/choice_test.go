package cmd

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pdproxy/pdproxy/cmd/exit"
)

// TestUnknownValues: a wrong value, flag or subcommand gets a message that names what the user
// has typed, lists the known ones and suggests one.
func TestUnknownValues(t *testing.T) {
	const connectors = `"vllm-nixl", "vllm-nixl-push", "vllm-moriio", "vllm-moriio-read", "vllm-mooncake", "vllm-p2p-tier", "sglang", "trtllm"`
	for line, want := range map[string]string{
		"demo --connector nixl":                `--connector: must be one of ` + connectors + `, found "nixl", did you mean vllm-nixl?`,
		"demo --connector=vllm-p2p-nccl":       `--connector: "vllm-p2p-nccl" is retired: vLLM removed`,
		"sim --connector vllm-p2p-nccl":        `--connector: "vllm-p2p-nccl" is retired: vLLM removed`,
		"demo --connector vllm-store":          `--connector: must be one of ` + connectors + `, found "vllm-store"`,
		"demo --place kvaware":                 `found "kvaware", did you mean kv_aware?`,
		"sim --role foo":                       `--role: must be one of "prefill", "decode", "both", "encode", found "foo"`,
		"sim --role decoder":                   `did you mean decode?`,
		"sim --fail often":                     `--fail: must be one of "500", "503"`,
		"sim --fail 0.1:sseerror":              `found "sseerror", did you mean sse-error?`,
		"sim --hang prefil":                    `--hang: must be one of "prefill", "decode", "head", "stream", "connect", "sleep", found "prefil", did you mean prefill?`,
		"sim --nixl-wire 9":                    `--nixl-wire: must be one of "1", "2", "3", "4", "5", "6", found "9"`,
		"replay --preset h100":                 `--preset: must be one of "llama70b-h100", "llama70b-a100", "deepseek-v3-h200", found "h100", did you mean llama70b-h100?`,
		"replay --variant shift:1":             `--variant: must be one of "bursty", "joined", "mixed", "resampled", "shifted", "thinned", found "shift", did you mean shifted?`,
		"replay --policy LeastLoad":            `did you mean least_load?`,
		"replay --runtime wsm":                 `--runtime: must be one of "wasm", "native", found "wsm", did you mean wasm?`,
		"bench --api response":                 `--api: must be one of "chat", "completions", "responses", found "response", did you mean responses?`,
		"bench --sweep rates=1":                `--sweep: must be one of "rate", "concurrency", "speed", found "rates", did you mean rate?`,
		"plugin new --lang tiny-go x":          `--lang: must be one of "go", "tinygo", "rust", "c", found "tiny-go", did you mean tinygo?`,
		"plugin new --kind filters x":          `--kind: must be one of "place", "plan", "mint", "leg", "score", "filter", "policy", found "filters", did you mean filter?`,
		"plugin test --guest-log warning m f":  `--guest-log: must be one of "trace", "debug", "info", "warn", "error", "critical", found "warning"`,
		"run --log-level WARN x":               `--log-level: must be one of "debug", "info", "warn", "error", found "WARN", did you mean warn?`,
		"--log-format jsn version":             `--log-format: must be one of "text", "json", found "jsn", did you mean json?`,
		"demo --prefill two":                   `--prefill: want a whole number, found "two"`,
		"bench --rate much":                    `--rate: want a number, found "much"`,
		"demo --traffic=maybe":                 `--traffic: want true or false, found "maybe"`,
		"bench --think 5":                      `--think: time: missing unit in duration "5"`,
		"demo --conector sglang":               `unknown flag: --conector, did you mean --connector?`,
		"quickstart nixl":                      `quickstart: the command must be one of "sglang", `,
		"quickstart push":                      `did you mean vllm-nixl-push?`,
		"quickstart vllm-p2p-nccl --prefill 2": `quickstart: the command "vllm-p2p-nccl" is retired`,
		"import llm x":                         `did you mean llm-d?`,
		"import vllm x":                        `import: the command must be one of "dynamo", "litellm", "llm-d", "production-stack", "sglang-router", "trtllm", "vllm-router", found "vllm", did you mean vllm-router?`,
		"demo --place kv":                      `"kv_aware", "pair_aware", `,
		"statu":                                `pdproxy: the command must be one of "admin-token", "bench", `,
		"statu --once":                         `found "statu", did you mean status?`,
		"keys lits --config x":                 `keys: the command must be one of "list", "new", "revoke", found "lits", did you mean list?`,
		"--json explian x":                     `did you mean explain?`,
		"keys lits":                            `keys: the command must be one of`,
	} {
		code, _, stderr := run(strings.Fields(line)...)
		if code != exit.Usage || !strings.Contains(stderr, want) || strings.Contains(stderr, "config ") {
			t.Errorf("%s: exit %d, %s", line, code, stderr)
		}
	}
}

// complete returns what a shell gets for the last word of a line: the completions, and the
// directive of cobra.
func complete(words ...string) (list []string, directive string) {
	_, stdout, _ := run(append([]string{cobra.ShellCompNoDescRequestCmd}, words...)...)
	list = strings.Fields(stdout)
	return list[:len(list)-1], list[len(list)-1]
}

const (
	wordsOnly = ":4"
	wordsOpen = ":6" // more text of the same word follows
	filesOf   = ":8" // files with the suffixes in the list
	folders   = ":16"
	anyFiles  = ":0"
)

func TestCompletion(t *testing.T) {
	for line, want := range map[string]string{
		"demo --connector s":         "sglang " + wordsOnly,
		"demo --connector vllm-n":    "vllm-nixl vllm-nixl-push " + wordsOnly,
		"sim --connector vllm-s":     "vllm-store " + wordsOnly,
		"demo --place=p":             "power_of_two pair_aware " + wordsOnly,
		"sim --role _":               "prefill decode both encode " + wordsOnly,
		"sim --fail 0.1:n":           "0.1:no-params " + wordsOnly,
		"sim --ec-dir _":             anyFiles,
		"replay --variant s":         "shifted: " + wordsOpen,
		"replay --policy kv":         "kv_aware " + wordsOnly,
		"replay --policy ./":         "wasm " + filesOf,
		"replay --trace _":           "jsonl " + filesOf,
		"bench --sweep c":            "concurrency= " + wordsOpen,
		"bench compare _":            "jsonl " + filesOf,
		"bench --url _":              wordsOnly,
		"run --log-level _":          "debug info warn error " + wordsOnly,
		"--log-format _":             "text json " + wordsOnly,
		"run _":                      "toml " + filesOf,
		"check --strict _":           "toml " + filesOf,
		"check config.toml _":        wordsOnly,
		"plugin build _":             folders,
		"plugin test _":              "wasm " + filesOf,
		"plugin test m.wasm _":       "json " + filesOf,
		"import trtllm _":            "yaml yml " + filesOf,
		"import llm-d _":             anyFiles,
		"quickstart vllm-m":          "vllm-mooncake vllm-moriio vllm-moriio-read " + wordsOnly,
		"quickstart sglang --out _":  folders,
		"explain --token-file _":     anyFiles,
		"explain _":                  wordsOnly,
		"plugin new --kind _":        "place plan mint leg score filter policy " + wordsOnly,
		"plugin test --guest-log tr": "trace " + wordsOnly,
	} {
		words := strings.Fields(line)
		if last := len(words) - 1; words[last] == "_" {
			words[last] = ""
		}
		list, directive := complete(words...)
		if got := strings.Join(append(list, directive), " "); got != want {
			t.Errorf("%s: %s, want %s", line, got, want)
		}
	}
}

// TestChoices: each value that the completion of a flag offers is one that the flag accepts, and
// the help text lists the values.
func TestChoices(t *testing.T) {
	found := 0
	var visit func(c *cobra.Command)
	visit = func(c *cobra.Command) {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			v, ok := f.Value.(checkedValue)
			if !ok {
				return
			}
			found++
			words := strings.Fields(c.CommandPath())[1:]
			list, _ := complete(append(words, "--"+f.Name, "")...)
			if len(list) != len(v.allowed) || !strings.Contains(f.Usage, strings.Join(v.allowed, ", ")) && f.Name != "sweep" {
				t.Errorf("%s --%s: completions %q, %s", c.CommandPath(), f.Name, list, f.Usage)
			}
			for _, value := range list {
				if err := f.Value.Set(value); err != nil {
					t.Errorf("%s --%s %s: %v", c.CommandPath(), f.Name, value, err)
				}
			}
		})
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	visit(Tree())
	if found < 20 {
		t.Errorf("%d flags with a list of values", found)
	}
}

// TestBashCompletion: bash completes with the script that the program prints.
func TestBashCompletion(t *testing.T) {
	_, script, _ := run("completion", "bash")
	// The function _init_completion of the package bash-completion splits the line. compopt
	// works only while a person completes.
	script += `
compopt() { :; }
_init_completion() { words=("${COMP_WORDS[@]}"); cword=$COMP_CWORD; cur=${words[cword]}; prev=${words[cword-1]}; }
pdproxy() { "$PROGRAM" "$@"; }
COMP_WORDS=(pdproxy "$@"); COMP_CWORD=$#; COMP_LINE="pdproxy $*"; COMP_POINT=${#COMP_LINE}; COMP_TYPE=9
__start_pdproxy
printf '%s\n' "${COMPREPLY[@]}"
`
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string][]string{
		"demo --place k":    {"kv_aware"},
		"sim --role p":      {"prefill"},
		"demo --conn":       {"--connector"},
		"sim --connector v": {"vllm-nixl", "vllm-nixl-push", "vllm-store", "vllm-moriio", "vllm-moriio-read", "vllm-mooncake", "vllm-p2p-tier"},
	} {
		cmd := exec.Command("bash", append([]string{"-c", script, "bash"}, strings.Fields(line)...)...)
		cmd.Env = append(os.Environ(), asProgram+"=1", "PROGRAM="+program)
		out, err := cmd.CombinedOutput()
		if got := strings.Fields(string(out)); err != nil || !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))) {
			t.Errorf("%s: %q, %v", line, out, err)
		}
	}
}
