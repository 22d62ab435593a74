package importer

import (
	"encoding/json"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// Dynamo converts the flags of Dynamo's frontend, or a DynamoGraphDeployment. Names and defaults
// of the flags are those of components/src/dynamo/frontend/frontend_args.py and of
// router_args.py and kv_router_args.py in components/src/dynamo/common/configuration/groups.
func Dynamo(f File) (Result, error) {
	r := &report{}
	if !r.accepts(f, "dynamo") {
		return Result{}, r.problems
	}
	d := &dynamo{doc: &document{from: "the flags of Dynamo's frontend"}}
	y := &yamlFile{report: r, file: f.Name}
	graph, isGraph := y.graph(f)
	switch {
	case len(r.problems) > 0:
		return r.finish(f.Name, d.doc)
	case isGraph:
		d.doc.from = "a DynamoGraphDeployment"
		d.flags = &flags{report: r, file: f.Name, specs: dynamoFlags(), uses: map[string][]use{}}
		g := &dynamoGraph{yamlFile: y, dynamo: d}
		g.read(graph)
	default:
		d.flags = readFlags(r, f, programsOf("dynamo"), dynamoFlags())
		d.read()
		if len(r.problems) == 0 {
			d.warn(d.file, 0, "", "the result has no engine: the frontend finds its workers in %s. %s; name them as [[engine]]", d.discovery(), noHTTP)
		}
	}
	return r.finish(f.Name, d.doc)
}

// dynamo reads the flags of the frontend into doc.
type dynamo struct {
	*flags
	doc *document
	// conditional reports that short prompts stay on the decode worker.
	conditional bool
}

// noHTTP says what a Dynamo worker needs to become an engine.
const noHTTP = "Dynamo's workers have no HTTP API: start the engines by vllm serve, sglang.launch_server or trtllm-serve, with the same flags for the model and the KV transfer"

func dynamoFlags() map[string]flagSpec {
	specs := oneValue("http-host", "http-port", "tls-cert-path", "tls-key-path", "router-mode", "migration-limit", "migration-max-seq-len",
		"router-conditional-disagg-config", "discovery-backend", "active-decode-blocks-threshold",
		"router-conditional-prefill-max-new-tokens", "router-conditional-prefill-eff-isl-threshold", "router-conditional-prefill-policy")
	for _, name := range []string{"enforce-disagg", "router-conditional-disagg", "router-conditional-prefill", "load-aware"} {
		specs[name] = flagSpec{arity: takesSwitch, negatable: true}
	}
	const runtime = "the proxy calls engines over HTTP and finds them by [[engine]] or [discovery]"
	const score = "kv_aware counts cached blocks and queued tokens as seconds, so weights have no equal"
	const index = "the index follows the engines' KV events where kv_events is set, and estimates elsewhere"
	const engine = "the engines parse and tokenize chats themselves"
	const prefill = "the proxy does not bound the prompt tokens of an engine: limits.saturation_queue_depth holds requests back while requests wait in the engines"
	const metrics = "metrics are on the admin address"
	toggle := func(note string) flagSpec { return flagSpec{arity: takesSwitch, negatable: true, note: note} }
	lost := func(note string, off ...string) flagSpec { return lostFlag(note, append(off, "None")...) }
	for note, names := range map[string][]string{
		score: {"router-kv-overlap-score-credit", "router-kv-overlap-score-credit-decay", "router-kv-overlap-score-weight", "kv-overlap-score-weight",
			"router-prefill-load-scale", "router-decode-active-request-weight", "router-host-cache-hit-weight", "router-disk-cache-hit-weight",
			"router-temperature", "shared-cache-multiplier", "router-prefill-load-model", "router-queue-policy",
			"aic-backend", "aic-system", "aic-model-path", "aic-backend-version", "aic-tp-size"},
		index: {"router-ttl-secs", "router-ttl", "router-max-tree-size", "router-prune-target-ratio", "router-approximate-cache-policy", "router-event-threads",
			"router-predicted-ttl-secs", "shared-cache-type", "kv-cache-block-size", "router-snapshot-threshold", "router-tracking-hash", "router-tracking-key-file", "router-tracking-key-id"},
		runtime: {"namespace", "namespace-prefix", "request-plane", "event-plane", "store-kv", "model-name", "model-path", "router-min-initial-workers"},
		engine:  {"dyn-chat-processor", "dyn-preprocess-workers", "tokenizer", "custom-jinja-template"},
		metrics: {"metrics-prefix", "grpc-metrics-port", "dump-config-to", "custom-backend-metrics-endpoint", "custom-backend-metrics-polling-interval"},
	} {
		for _, name := range names {
			specs[name] = noted(note)
		}
	}
	for note, names := range map[string][]string{
		index: {"router-kv-events", "kv-events", "router-replica-sync", "router-track-active-blocks", "track-active-blocks", "router-track-output-blocks",
			"track-output-blocks", "router-assume-kv-reuse", "assume-kv-reuse", "router-track-prefill-tokens", "use-remote-indexer", "serve-indexer",
			"enable-session-prefix-index", "router-reset-states", "router-durable-kv-events"},
		engine: {"exclude-tools-when-tool-choice-none", "trust-remote-code", "strip-anthropic-preamble", "enable-streaming-tool-dispatch",
			"enable-streaming-reasoning-dispatch", "dyn-debug-perf", "interactive"},
	} {
		for _, name := range names {
			specs[name] = toggle(note)
		}
	}
	maps.Copy(specs, map[string]flagSpec{
		"decode-fallback": toggle("with prefill engines in the configuration, each request that plan splits waits for one: limits.no_engine_timeout"),
		"router-conditional-prefill-eff-isl-ratio-threshold": noted("pd_auto has no share of the prompt: it keeps a prompt of which no part is cached apart"),
		"router-conditional-prefill-bypass-below-tokens":     lost("pd_auto has no minimum for the whole prompt: short prompts without a cached part have a prefill leg", "0"),
		"router-conditional-prefill-prefill-busy-threshold":  lost("pd_auto does not ask whether engines are busy"),
		"router-conditional-prefill-decode-busy-threshold":   lost("pd_auto does not ask whether engines are busy"),
		"enable-anthropic-api":                               toggle("always on: the proxy serves /v1/messages"),
		"admission-control":                                  noted("set with active-decode-blocks-threshold: see limits.saturation_kv_usage"),
		"active-prefill-tokens-threshold":                    lost(prefill),
		"active-prefill-tokens-threshold-frac":               lost(prefill),
		"router-queue-threshold":                             lost(prefill),
		"busy-threshold":                                     lost("a share of KV memory: set limits.saturation_queue_depth and limits.saturation_kv_usage"),
		"router-policy-config":                               lost("the file is not read: its queues are [[priority_class]], its policies [policy]"),
		"router-prefill-policy":                              lost("a policy of the router's plugins has no equivalent: write it as a place policy ([[plugin]])", "default"),
		"router-decode-policy":                               lost("a policy of the router's plugins has no equivalent: write it as a place policy ([[plugin]])", "default"),
		"kserve-grpc-server":                                 {arity: takesSwitch, negatable: true, lost: true, note: "the proxy has no KServe gRPC API"},
	})
	return specs
}

// read reads all flags.
func (d *dynamo) read() {
	host, ok := d.text("http-host")
	if !ok {
		host = "0.0.0.0"
	}
	port, ok := d.integer("http-port", 1, 65535)
	if !ok {
		port = 8000
	}
	d.doc.set("server", "listen", text(net.JoinHostPort(host, strconv.Itoa(port))), "--http-host, --http-port")
	cert, hasCert := d.text("tls-cert-path")
	key, hasKey := d.text("tls-key-path")
	switch {
	case hasCert != hasKey:
		d.problem(d.file, max(d.line("tls-cert-path"), d.line("tls-key-path")), "--tls-cert-path, --tls-key-path", "each needs the other")
	case hasCert:
		d.doc.set("server.tls", "cert", text(cert), "--tls-cert-path")
		d.doc.set("server.tls", "key", text(key), "--tls-key-path")
	}
	d.place()
	d.plan()
	d.migration()
	if x, ok := d.text("active-decode-blocks-threshold"); ok && x != "None" {
		if usage, ok := d.float("active-decode-blocks-threshold", 0, 1); ok && usage > 0 {
			d.doc.set("limits", "saturation_queue_depth", number(1<<20), "Dynamo does not count waiting requests")
			d.doc.set("limits", "saturation_kv_usage", float(usage), "--active-decode-blocks-threshold; requests wait in the queue, where Dynamo refuses them")
		}
	}
	d.dropped(d.doc)
}

func (d *dynamo) discovery() string {
	if kind, ok := d.text("discovery-backend"); ok {
		return kind
	}
	return "etcd"
}

// place chooses the place policy by --router-mode.
func (d *dynamo) place() {
	mode, ok := d.text("router-mode")
	switch {
	case d.enabled("load-aware", false):
		d.doc.set("policy", "place", text("least_load"), "--load-aware; by requests and tokens in flight")
		return
	case !ok:
		mode = "round-robin"
	}
	policies := map[string]string{"round-robin": "round_robin", "random": "round_robin", "power-of-two": "power_of_two", "kv": "kv_aware",
		"least-loaded": "least_load", "device-aware-weighted": "least_load"}
	why := map[string]string{"random": "requests spread just as evenly", "kv": "counts cached blocks and queued tokens as seconds",
		"device-aware-weighted": "engines with less load get more requests, whatever their device"}
	switch place := policies[mode]; {
	case mode == "direct":
		d.lose(d.doc, d.file, d.line("router-mode"), "--router-mode", "direct: a client cannot name its engine; the result has the default policy")
	case place == "":
		d.problem(d.file, d.line("router-mode"), "--router-mode", "want one of %s", strings.Join(append(slices.Sorted(maps.Keys(policies)), "direct"), ", "))
	default:
		d.doc.set("policy", "place", text(place), strings.TrimSuffix("--router-mode "+mode+"; "+why[mode], "; "))
		if mode == "kv" {
			d.warn(d.file, d.line("router-mode"), "--router-mode", "set kv_events of each engine (vLLM: --kv-events-config); without them the proxy assumes that an engine keeps the prompts that it was sent")
		}
	}
}

// plan reads when prefill runs apart: always if there are prefill workers, unless the router is
// conditional (lib/kv-router/src/conditional_disagg.rs): then a prompt stays on the decode worker
// if fewer than eff_isl_threshold of its tokens, and a share below eff_isl_ratio_threshold, are
// not cached there.
func (d *dynamo) plan() {
	switch {
	case d.enabled("router-conditional-prefill", false):
		d.conditionalPrefill()
	case d.enabled("router-conditional-disagg", false):
		d.conditionalDisagg()
	case d.enabled("enforce-disagg", false):
		d.doc.set("policy", "plan", text("always"), "--enforce-disagg")
	}
}

// conditionalDisagg reads the rule of a conditional router.
func (d *dynamo) conditionalDisagg() {
	d.conditional = true
	settings := struct {
		Policy    string   `json:"policy"`
		Threshold int      `json:"eff_isl_threshold"`
		Ratio     float64  `json:"eff_isl_ratio_threshold"`
		Prefill   *float64 `json:"prefill_busy_threshold"`
		Decode    *float64 `json:"decode_busy_threshold"`
	}{Policy: "isl_bounding", Threshold: 2048, Ratio: 0.7}
	const name = "router-conditional-disagg-config"
	if s, ok := d.text(name); ok {
		if err := json.Unmarshal([]byte(s), &settings); err != nil {
			d.problem(d.file, d.line(name), "--"+name, "want a JSON object with policy, eff_isl_threshold and eff_isl_ratio_threshold")
			return
		}
	}
	line := max(d.line(name), d.line("router-conditional-disagg"))
	d.doc.set("policy", "plan", text("pd_auto"), "--router-conditional-disagg; without local_tokens the policy compares measured times")
	if settings.Policy != "prefill_load" && settings.Threshold > 0 {
		d.doc.set("policy.params.pd_auto", "local_tokens", float(float64(settings.Threshold-1)), "eff_isl_threshold; engines that also compute short prompts need role both")
	}
	if settings.Policy != "isl_bounding" || settings.Prefill != nil || settings.Decode != nil {
		d.lose(d.doc, d.file, line, "--"+name, "the policies prefill_load and isl_or_load have no equivalent: pd_auto does not ask whether engines are busy")
	}
	d.doc.note(line, "--router-conditional-disagg", "eff_isl_ratio_threshold %g has no equivalent: pd_auto keeps a prompt of which no part is cached apart, and others by local_tokens alone", settings.Ratio)
}

// conditionalPrefill reads the flags that replaced those of the conditional disaggregation.
func (d *dynamo) conditionalPrefill() {
	d.conditional = true
	d.doc.set("policy", "plan", text("pd_auto"), "--router-conditional-prefill; without local_tokens the policy compares measured times")
	for _, name := range []string{"router-conditional-prefill-max-new-tokens", "router-conditional-prefill-eff-isl-threshold"} {
		if n, ok := d.integer(name, 1, 1<<30); ok {
			d.doc.set("policy.params.pd_auto", "local_tokens", float(float64(n-1)), "--"+name+"; engines that also compute short prompts need role both")
			break
		}
	}
	const name = "router-conditional-prefill-policy"
	if policy, ok := d.text(name); ok && policy != "isl_bounding" {
		d.lose(d.doc, d.file, d.line(name), "--"+name, "only isl_bounding has an equivalent: pd_auto does not ask whether engines are busy")
	}
}

// migration reads how a stream goes on after the failure of its worker.
func (d *dynamo) migration() {
	n, ok := d.integer("migration-limit", 0, 1<<32-1)
	switch {
	case !ok:
	case n == 0:
		d.doc.set("retry", "continue", text(config.ContinueOff), "--migration-limit 0")
	default:
		d.doc.set("retry", "attempts", number(min(n, 999)+1), "--migration-limit and the first try")
		d.doc.set("retry", "continue", text(config.ContinueOn), "--migration-limit")
	}
	if n, ok := d.integer("migration-max-seq-len", 1, 1<<32-1); ok {
		d.doc.set("retry", "continue_tokens", number(n), "--migration-max-seq-len")
	}
}
