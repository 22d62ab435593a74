package importer

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// expect compares findings with "line key: part of the message".
func expect(t *testing.T, what string, got []Finding, want []string) {
	t.Helper()
	var lines []string
	for _, f := range got {
		lines = append(lines, strings.TrimPrefix(f.String(), f.File+": "))
	}
	if len(lines) != len(want) {
		t.Errorf("%s: %q, want %q", what, lines, want)
		return
	}
	for i := range want {
		place, part, _ := strings.Cut(want[i], " ~ ")
		if !strings.HasPrefix(lines[i], place) || !strings.Contains(lines[i], part) {
			t.Errorf("%s %d: %q, want %q", what, i, lines[i], want[i])
		}
	}
}

// Inputs with mistakes are refused. The problems name the lines.
func TestProblems(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		want       []string
	}{
		{"trtllm-empty", "# nothing\n", []string{"the file is empty: expected is a disagg_config.yaml"}},
		{"trtllm-binary", "\xff\xfe", []string{"the file is no UTF-8 text"}},
		{"trtllm-list", "\n- a\n", []string{"the file is no input of trtllm: expected is a disagg_config.yaml"}},
		{"trtllm-syntax", "port: 1\nhostname: [\n", []string{"line 2: invalid YAML"}},
		{"trtllm-twice", "port: 1\nhostname: a\nport: 2\n", []string{"line 3: port: is given twice"}},
		{"trtllm-twice within", "context_servers:\n  router: {type: round_robin, type: conversation}\n", []string{"line 2: context_servers.router.type: is given twice"}},
		{"trtllm-types", "hostname: 5\nport: '8000'\nnum_workers: 1.5\nallow_request_chat_template: 'yes'\ncontext_servers: []\n", []string{
			"line 1: hostname: want a string, found a int", "line 2: port: want a whole number, found a str",
			"line 3: num_workers: want a whole number, found a float", "line 4: allow_request_chat_template: want true or false, found a str",
			"line 5: context_servers: want keys with values, found a list"}},
		{"trtllm-ranges", "port: 65536\nnode_id: 256\nnum_workers: 65\nmax_retries: -1\n", []string{
			"line 1: port: must be from 1 to 65535, found 65536", "line 2: node_id: must be from 0 to 255", "line 3: num_workers", "line 4: max_retries"}},
		{"trtllm-choices", "schedule_style: both\ndisagg_coordinator_url: coordinator:1\ngeneration_servers: {router: {type: best}}\n", []string{
			"line 1: schedule_style: want context_first or generation_first", "line 2: disagg_coordinator_url", "line 3: generation_servers.router.type: \"best\""}},
		{"trtllm-urls", "context_servers:\n  num_instances: 5\n  urls:\n    - http://a:1\n    - a\n    - '[::1]:80'\n    - a:0\n    - {a: 1}\n", []string{
			"line 4: context_servers.urls ~ without a scheme", "line 5: context_servers.urls", "line 6: context_servers.urls", "line 7: context_servers.urls", "line 8: context_servers.urls"}},
		{"trtllm-count", "context_servers:\n  num_instances: 3\n  urls: ['a:1', 'b:1']\n", []string{"line 3: context_servers.num_instances: is 3, but there are 2 urls"}},
		{"trtllm-count by default", "context_servers:\n  urls: ['a:1', 'b:1']\n", []string{"line 2: context_servers.num_instances: is 1, but there are 2 urls"}},
		{"trtllm-inherited", "max_batch_size: 8\nmodel: a\ncontext_servers:\n  model: a\ngeneration_servers:\n  max_batch_size: 9\n", []string{
			"line 6: generation_servers.max_batch_size: has another value at the top level (line 1)"}},
		{"trtllm-cluster", "disagg_cluster:\n  cluster_name: a\n  minimal_instance: {}\n  minimal_instances: {context: 1}\n", []string{
			"line 1: disagg_cluster.cluster_uri: is required", "line 3: disagg_cluster.minimal_instance: unknown key", "line 4: disagg_cluster.minimal_instances.context: unknown key"}},
		{"trtllm-cluster address", "disagg_cluster: {cluster_uri: 'etcd://h'}\n", []string{"the result would have an invalid discovery.trtllm.cluster_uri"}},
		{"trtllm-cluster https", "disagg_cluster: {cluster_uri: 'https://h:1'}\n", []string{"line 1: disagg_cluster.cluster_uri: pdproxy has no storage over https"}},
		{"trtllm-use tokens", "generation_servers:\n  router:\n    type: load_balancing\n    use_tokens: true\n", []string{"line 4: generation_servers.router.use_tokens: true makes every request"}},
		{"trtllm-unknown", "conditional_disagg_config: {max_prefill: 5}\notlp_config: {endpoint: a}\n", []string{
			"line 1: conditional_disagg_config.max_prefill: unknown key", "line 2: otlp_config.endpoint: unknown key"}},
		{"trtllm-host", "hostname: 'no host'\n", []string{"the result would have an invalid server.listen"}},
		{"trtllm-metadata", "server_type: zookeeper\nhostname: http://h\nrefresh_interval: .nan\nhealth_timeout: 5\n", []string{
			"line 1: server_type: want etcd", "line 2: hostname", "line 3: refresh_interval", "line 4: health_timeout: unknown key"}},
		{"trtllm-metadata twice", "server_type: etcd\nrefresh_interval: 1\nrefersh_interval: 2\n", []string{"line 3: refersh_interval: is a misspelled refresh_interval, and the file also has refresh_interval"}},
		{"trtllm-merge", "a: &a\n  <<: *a\n<<: 5\n", []string{"line 3: a merge key"}},
		{"trtllm-merge cycle", "context_servers: &a\n  <<: *a\n", []string{"line 2: context_servers: a merge key"}},

		{"vllm-empty", "# nothing\n", []string{"the file is empty: expected is the flags of vllm-router"}},
		{"vllm-no flags", "vllm-router\n", []string{"the text has no flags of that router"}},
		{"vllm-other file", "[server]\nlisten = 'a'\n", []string{"the file is no input of vllm-router"}},
		{"vllm-binary", "--port 1\x00", []string{"the file is no UTF-8 text"}},
		{"vllm-quote", "--port 1 \\\n  --host 'a\nb", []string{"line 2: a quote is not closed"}},
		{"vllm-variables", "cd $HOME &\n$VLLM/vllm-router --worker-urls http://a '$literal'\n--port \"$PORT\"\n--host `hostname`", []string{
			"line 2: --worker-urls: want a URL", "line 3: the shell would replace", "line 3: --port", "line 4: the shell would run"}},
		{"vllm-values", "--port http\n--host\n--disable-retries=true\n--policy best\n--cache-threshold 2\n--policy cache_aware extra\n", []string{
			"line 1: --port: want a whole number from 1 to 65535", "line 2: --host: has no value", "line 3: --disable-retries: takes no value", "line 5: --cache-threshold: want a number from 0 to 1",
			"line 6: --policy: has one argument too many"}},
		{"vllm-policies", "--worker-urls http://a --policy best --kv-connector x --backend y", []string{"line 1: --policy: unknown policy", "line 1: --backend"}},
		{"vllm-urls", "--worker-urls a:1 ftp://a http://a?b http://a#b http://:1\n", []string{
			"line 1: --worker-urls", "line 1: --worker-urls", "line 1: --worker-urls ~ query", "line 1: --worker-urls ~ query", "line 1: --worker-urls"}},
		{"vllm-pd without engines", "--vllm-pd-disaggregation\n--kv-connector nixl", []string{"line 1: --vllm-pd-disaggregation: needs"}},
		{"vllm-moriio", "--vllm-pd-disaggregation --prefill http://a --decode http://b\n--kv-connector moriio", []string{"line 2: --kv-connector: moriio needs"}},
		{"vllm-connector", "--vllm-pd-disaggregation --prefill http://a --decode http://b\n--kv-connector x", []string{"line 2: --kv-connector: want nixl", "it leads to"}[:1]},
		{"vllm-discovery", "--vllm-pd-disaggregation\n--vllm-discovery-address nowhere", []string{"line 2: --vllm-discovery-address: want host:port"}},
		{"vllm-bootstrap", "--vllm-pd-disaggregation --decode http://b\n--prefill http://a 99999 9", []string{"line 2: --prefill: has one argument too many", "line 2: --prefill: want a bootstrap port"}},
		{"vllm-misspelt", "--worker-urls http://a\n--polciy random", []string{"line 2: --polciy: unknown flag; is --policy meant?"}},
		{"sglang-tls", "--worker-urls http://a\n--tls-cert-path a", []string{"line 2: --tls-cert-path, --tls-key-path: each needs the other"}},
		{"sglang-backend", "--worker-urls http://a\n--backend best", []string{"line 2: --backend: want sglang"}},
		{"sglang-ports", "--worker-urls http://a --port 29000 --host 127.0.0.1", []string{"the result would have an invalid admin.listen ~ is already used by server.listen"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			res, err := importFile(tt.name, []byte(tt.text))
			var problems Problems
			if !errors.As(err, &problems) {
				t.Fatalf("no problems: %v, %s", err, res.TOML)
			}
			expect(t, "problem", problems, tt.want)
			if err.Error() != strings.TrimSuffix(warnings(problems), "\n") {
				t.Errorf("got error %q", err)
			}
		})
	}
}

// The import warns of known traps of the other routers, with their lines.
func TestTraps(t *testing.T) {
	const urls = "context_servers: {urls: ['a:1']}\ngeneration_servers: {urls: ['b:1']}\n"
	for _, tt := range []struct {
		name, text string
		want       []string
		toml       string
	}{
		{"trtllm-plain", urls, nil, `url = "http://a:1"`},
		{"trtllm-no engines", "port: 1\n", []string{"the file names no urls and no cluster"}, ""},
		{"trtllm-misspelt here", urls + "refersh_interval: 5\n", []string{"line 3: refersh_interval: has no effect in this file ~ as refresh_interval"}, ""},
		{"trtllm-metadata here", urls + "metadata_config: {hostname: a}\n", []string{"line 3: metadata_config: has no effect"}, ""},
		{"trtllm-metadata alone", "server_type: etcd\nrefresh_interval: 0.5\n", nil, `refresh_interval = "500ms"`},
		{"trtllm-misspelt", urls + "max_retrys: 5\n", []string{"line 3: max_retrys: has no effect in TensorRT-LLM; is max_retries meant?"}, ""},
		{"trtllm-urls in a cluster", urls + "disagg_cluster: {cluster_uri: 'http://h:1'}\n",
			[]string{"line 1: context_servers.urls: TensorRT-LLM ignores them", "line 2: generation_servers.urls: TensorRT-LLM ignores them", "line 3: disagg_cluster.cluster_uri: pdproxy serves the storage"}, `cluster_uri = "http://h:1"`},
		{"trtllm-duplicate", "context_servers: {num_instances: 2, urls: ['a:1', 'a:1']}\n", []string{"line 1: context_servers.urls ~ is given twice"}, ""},
		{"trtllm-shared router", urls + "router: {type: load_balancing}\n", []string{"line 3: generation_servers.router: is the same object"}, `place = "least_load"`},
		{"trtllm-shared by alias", "context_servers:\n  router: &r {type: conversation}\ngeneration_servers:\n  router: *r\n",
			[]string{"the file names no urls", "line 2: generation_servers.router: is the same object"}, `place = "conversation"`},
		{"trtllm-use tokens", "context_servers:\n  urls: ['a:1']\n  router: {type: load_balancing, use_tokens: yes}\n", []string{"line 3: context_servers.router.use_tokens: fails for chats"}, ""},
		{"trtllm-conditional", urls + "conditional_disagg_config: {max_local_prefill_length: 5}\nschedule_style: generation_first\n",
			[]string{"conditional_disagg_config: in TensorRT-LLM it needs a kv_cache_aware router", "line 4: schedule_style: in TensorRT-LLM conditional_disagg_config works"}, `plan = "pd_auto"`},
		{"trtllm-conditional off", urls + "conditional_disagg_config: {}\n", nil, ""},
		{"trtllm-coordinator socket", urls + "disagg_coordinator_url: unix:/run/c.sock\n", nil, `coordinator = "unix:/run/c.sock"`},
		{"trtllm-booleans of YAML 1.1", urls + "gen_strip_message_history: on\nreturn_perf_metrics: No\n", nil, "gen_strip_message_history: pdproxy sends all messages"},

		{"vllm-last counts", "--worker-urls http://a\n--port 1\n--port 2\n--worker-urls http://b", []string{"line 3: --port: is given 2 times", "line 4: --worker-urls: is given 2 times"}, `listen = "127.0.0.1:2"`},
		{"vllm-prefill without the switch", "--prefill http://a\n--decode http://b", []string{"line 2: --prefill, --decode ~ pdproxy import uses them"}, `role = "prefill"`},
		{"vllm-prefill beside workers", "--prefill http://a --worker-urls http://c\n--decode http://b", []string{"line 2: --prefill, --decode ~ and reads --worker-urls"}, `name = "e0"`},
		{"vllm-workers beside pairs", "--vllm-pd-disaggregation --prefill http://a --decode http://b\n--worker-urls http://c", []string{"line 2: --worker-urls: the router ignores it"}, `name = "d0"`},
		{"vllm-unknown flag", "--worker-urls http://a\n--brand-new-thing 5 6\n--port 7", []string{"line 2: --brand-new-thing: unknown flag: pdproxy import ignores it"}, `listen = "127.0.0.1:7"`},
		{"vllm-prefixed", "--router-policy random --worker-urls http://a", nil, `place = "round_robin"`},
		{"vllm-open registry", "--vllm-pd-disaggregation --vllm-discovery-address 0.0.0.0:30001", []string{"line 1: --vllm-discovery-address: registrations are not authenticated"}, `listen = "tcp://0.0.0.0:30001"`},
		{"vllm-one engine twice", "--worker-urls http://a http://a/", []string{"line 1: --worker-urls ~ is given twice"}, ""},
		{"vllm-no engine", "--port 5", []string{"the input names no engine"}, ""},
		{"vllm-no breaker", "--worker-urls http://a --disable-circuit-breaker --cb-failure-threshold 5", nil, "failures = 1073741824"},
		{"vllm-generating probe", "--worker-urls http://a --health-check-endpoint health_generate", []string{"line 1: --health-check-endpoint: each probe generates"}, `health_path = "/health_generate"`},
		{"vllm-queue of none", "--worker-urls http://a --queue-size 0", nil, "queue = 0 "},
		{"vllm-backends", "--worker-urls http://a --backend trtllm", []string{"line 1: --backend: trtllm has no effect in the router"}, ""},
		{"sglang-limit off", "--worker-urls http://a --max-concurrent-requests -1 --prometheus-host ::1", nil, `listen = "[::1]:29000"`},
		{"sglang-policies", "--worker-urls http://a --policy bucket --cache-threshold 0.1 --prometheus-host localhost", nil, `place = "kv_aware"`},
		{"sglang-CAs", "--worker-urls https://a --ca-cert-paths a.pem b.pem --prometheus-host localhost", nil, "# - line 1: --ca-cert-paths: engine.ca is one file: put the certificates of all 2 into one"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			res, err := importFile(tt.name, []byte(tt.text))
			if err != nil {
				t.Fatal(err)
			}
			expect(t, "warning", res.Warnings, tt.want)
			if !strings.Contains(res.TOML, tt.toml) {
				t.Errorf("%q is missing in\n%s", tt.toml, res.TOML)
			}
		})
	}
}

// The import also reads the metadata server's file and --request_timeout.
func TestMetadataBeside(t *testing.T) {
	in := TRTLLM{
		Disagg:         File{"disagg.yaml", []byte("port: 8000\n")},
		Metadata:       File{"metadata.yaml", read(t, "testdata/trtllm-metadata.yaml")},
		RequestTimeout: 90 * time.Second,
	}
	res, err := in.Import()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`prefill = "90s"`, `metadata_uri = "etcd://etcd.lab:2379"`, `refresh_interval = "10s"`, "[health]\ntimeout = \"5s\""} {
		if !strings.Contains(res.TOML, want) {
			t.Errorf("%q is missing in\n%s", want, res.TOML)
		}
	}
	if got := warnings(res.Warnings); !strings.Contains(got, "metadata.yaml: line 4: refersh_interval") || strings.Contains(got, "no engine") {
		t.Errorf("warnings:\n%s", got)
	}
	in.Metadata.Text = []byte("port: x\n")
	_, err = in.Import()
	if err == nil || !strings.Contains(err.Error(), "metadata.yaml: line 1: port: want a whole number") {
		t.Errorf("got error %v", err)
	}
}

// The words of a flag file are split as a shell splits them.
func TestWords(t *testing.T) {
	for text, want := range map[string][]string{
		"vllm-router --a b":                                  {"--a", "b"},
		"--a b\r\n--c \\\r\n d\r\n":                          {"--a", "b", "--c", "d"},
		"--a 'b c' \"d \\\" e\" f\\ g h''i":                  {"--a", "b c", `d " e`, "f g", "hi"},
		"# c\n--a b#c # d\n--e":                              {"--a", "b#c", "--e"},
		"--a b\\\nc":                                         {"--a", "bc"},
		"- --a\n- \"-1\"\n-\n":                               {"--a", "-1"},
		"python3 -m vllm_router.launch_router --a b":         {"--a", "b"},
		"cd /x && ./target/release/vllm-router --a":          {"--a"},
		"docker run --rm image/vllm-router --a":              {"--rm", "image/vllm-router", "--a"},
		"nohup vllm-router --log-dir /var/log/vllm-router x": {"--log-dir", "/var/log/vllm-router", "x"},
		"vllm-router --a b > log 2>&1 &":                     {"--a", "b"},
		"vllm-router --a b 2> log":                           {"--a", "b"},
		"vllm-router --a '>' b | tee log":                    {"--a", ">", "b"},
		"cargo run --release -- \\\n --a":                    {"--a"},
	} {
		r := &report{}
		w := wordReader{report: r, text: text, line: 1}
		var got []string
		for _, word := range arguments(w.split(), []string{"vllm-router", "vllm_router.launch_router"}) {
			got = append(got, word.text)
		}
		if !slices.Equal(got, want) || len(r.problems) > 0 {
			t.Errorf("%q: %q %v, want %q", text, got, r.problems, want)
		}
	}
}

// Text of an input cannot end the string or the comment into which it is written.
func TestTextStaysInItsPlace(t *testing.T) {
	for _, input := range []string{
		"context_servers: {urls: ['a:1'], router: {type: round_robin, x: \"a\\n[server]\\nlisten = 'b'\"}}",
		"context_servers: {urls: ['a:1']}\n\"k\\n[server]\\u0085\": 1\n",
	} {
		res, err := importFile("trtllm", []byte(input))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Count(res.TOML, "\n[server]") != 1 {
			t.Error(res.TOML)
		}
	}
}

// TestMergeKeys: merge keys cost time in proportion to the file, whatever they name, and the
// first of equal keys counts.
func TestMergeKeys(t *testing.T) {
	merged := func(levels, width int) string {
		var b strings.Builder
		b.WriteString("a0: &a0 {hostname: inner, port: 8000}\n")
		for l := 1; l <= levels; l++ {
			fmt.Fprintf(&b, "a%d: &a%d\n  <<: [%s*a%d]\n", l, l, strings.Repeat(fmt.Sprintf("*a%d, ", l-1), width-1), l-1)
		}
		return b.String() + fmt.Sprintf("<<: *a%d\n", levels)
	}
	y := yamlFile{report: &report{}, file: "f"}
	root, ok := y.document(File{Text: []byte("<<: {port: 1, x: 1}\nport: 2\n")})
	if port, _ := root.find("port"); !ok || len(y.problems) > 0 || port.value.Value != "2" || len(root.entries) != 2 {
		t.Errorf("%v: %v", y.problems, root.entries)
	}
	for _, levels := range []int{1, 7, 8} {
		y := yamlFile{report: &report{}, file: "f"}
		root, ok := y.document(File{Text: []byte(merged(levels, 20))})
		refused := levels == 8 // the outermost table has the first level
		if !ok || y.read > 20*(levels+2)+10 || (len(y.problems) > 0) != refused {
			t.Fatalf("%d levels: %d keys read: %v", levels, y.read, y.problems)
		}
		if host, _ := root.find("hostname"); !refused && (host.value == nil || host.value.Value != "inner") {
			t.Errorf("%d levels: %v", levels, host)
		}
	}
	var many strings.Builder
	for i := range maxKeys / 100 {
		fmt.Fprintf(&many, "k%d: 1\n", i)
	}
	text := "a: &a\n  " + strings.ReplaceAll(strings.TrimSpace(many.String()), "\n", "\n  ") + "\nmodel_list:\n" + strings.Repeat("- *a\n", 200)
	if _, err := importFile("litellm", []byte(text)); err == nil || !strings.Contains(err.Error(), "more than 65536 keys") {
		t.Errorf("aliases of a wide mapping: %.300v", err)
	}
}
