package importer

import (
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TRTLLM is the input of `trtllm-serve disaggregated`.
type TRTLLM struct {
	// Disagg is disagg_config.yaml (-c).
	Disagg File
	// Metadata is the metadata server's file (-m); empty: none.
	Metadata File
	// RequestTimeout is --request_timeout.
	RequestTimeout time.Duration
}

// DefaultRequestTimeout is the default of `trtllm-serve disaggregated`.
const DefaultRequestTimeout = 180 * time.Second

// Import returns a configuration. Keys and defaults are those of extract_disagg_cfg in
// tensorrt_llm/llmapi/disagg_utils.py. The metadata server's file alone is accepted
// too.
func (in TRTLLM) Import() (Result, error) {
	found := &report{}
	if !found.accepts(in.Disagg, "trtllm") {
		return Result{}, found.problems
	}
	r := &trtllm{yamlFile: yamlFile{report: found, file: in.Disagg.Name}, doc: &document{from: "a TensorRT-LLM disagg_config.yaml"}}
	root, ok := r.document(in.Disagg)
	switch {
	case !ok:
	case len(in.Metadata.Text) == 0 && isMetadata(root):
		r.doc.from = "a TensorRT-LLM metadata server's configuration"
		r.metadata(root)
	default:
		r.read(root, in)
		r.timeouts(in.RequestTimeout)
	}
	if len(in.Metadata.Text) > 0 {
		m := &trtllm{yamlFile: yamlFile{report: r.report, file: in.Metadata.Name}, doc: r.doc}
		if t, ok := m.yamlFile.document(in.Metadata); ok {
			m.metadata(t)
		}
	}
	return r.finish(in.Disagg.Name, r.doc)
}

// trtllm reads a disagg_config.yaml into doc.
type trtllm struct {
	yamlFile
	doc *document
	// clustered: the workers register themselves. Then urls are ignored.
	clustered bool
	// conditional reports that the generation servers also compute the prefill of short prompts.
	conditional bool
}

func (r *trtllm) read(root *table, in TRTLLM) {
	r.front(root)
	r.fleet(root)
	r.cluster(root)
	r.behaviour(root)
	r.observability(root)
	ctx, _, _ := r.sub(root, "context_servers")
	gen, _, _ := r.sub(root, "generation_servers")
	r.misplaced(root)
	r.inherit(root, ctx, gen)

	context := &server{table: ctx, prefix: "p", role: config.RolePrefill}
	generation := &server{table: gen, prefix: "d", role: config.RoleDecode}
	sharedType := shared(ctx, gen)
	context.router = r.router(context, false)
	generation.router = r.router(generation, sharedType)
	if r.conditional && generation.router.kind != routerKV {
		r.warn(r.file, 0, "conditional_disagg_config", "in TensorRT-LLM it needs a kv_cache_aware router of generation_servers, and every request fails without one")
	}
	r.place(context, generation)
	for _, s := range []*server{context, generation} {
		r.servers(s)
	}
	r.engines(context, generation)
	if r.doc.engines() == 0 && !r.clustered && len(in.Metadata.Text) == 0 {
		r.warn(r.file, 0, "", "the file names no urls and no cluster: the result has no engine")
	}
}

// front reads the address on which the orchestrator listens.
func (r *trtllm) front(root *table) {
	host, _, given := r.text(root, "hostname")
	if !given {
		host = "localhost"
	}
	port, _, given := r.integer(root, "port", 1, 65535)
	if !given {
		port = 8000
	}
	r.doc.set("server", "listen", text(net.JoinHostPort(host, strconv.Itoa(port))), "hostname, port")
	if n, _, ok := r.integer(root, "server_keep_alive_timeout", 1, 1_000_000); ok {
		r.doc.set("server", "idle_timeout", seconds(float64(n)), "server_keep_alive_timeout")
	}
	r.doc.note(0, "request bodies", "TensorRT-LLM has no limit; pdproxy's limit is server.max_body, 16MiB by default")
	if adminPort := 9090; port == adminPort {
		r.doc.set("admin", "listen", text("127.0.0.1:9091"), "the public port is the default port of admin.listen")
	}
}

// timeouts derives the time-outs from total, the limit of a whole exchange.
func (r *trtllm) timeouts(total time.Duration) {
	limit := seconds(total.Seconds())
	r.doc.set("timeouts", "prefill", limit, "--request_timeout; in pdproxy for each attempt")
	r.doc.set("timeouts", "first_byte", limit, "--request_timeout; the other proxy cuts longer streams, pdproxy does not")
}

// fleet reads the processes that share the port, and their ids.
func (r *trtllm) fleet(root *table) {
	workers, at, _ := r.integer(root, "num_workers", 1, 64)
	url, e, coordinator := r.text(root, "disagg_coordinator_url")
	if workers > 1 || coordinator && workers == 1 {
		r.doc.set("fleet", "workers", number(workers), "num_workers")
	}
	if workers > 1 && !coordinator {
		r.doc.note(at.line, "num_workers", "in TensorRT-LLM workers of other hosts connect to port - 1 of the coordinator; in pdproxy to fleet.listen, by default a private socket")
	}
	if coordinator {
		address, http := strings.CutPrefix(strings.TrimSuffix(url, "/"), "http://")
		if !http && !strings.HasPrefix(url, "unix:") {
			r.problem(r.file, e.line, "disagg_coordinator_url", "want http://host:port or unix:/path")
		} else {
			r.doc.set("fleet", "coordinator", text(address), "disagg_coordinator_url")
			if host, _, err := net.SplitHostPort(address); err == nil && http && !loopback(host) {
				r.doc.set("fleet", "open", value("true"), "as in TensorRT-LLM: no authentication, although pdproxy encrypts the connection; better: token_file, the same on both sides")
			}
		}
	}
	if id, _, ok := r.integer(root, "node_id", 0, 255); ok {
		r.doc.set("fleet", "node_id", number(id), "node_id")
	} else {
		r.doc.note(0, "node_id", "not set: TensorRT-LLM derives it from the MAC address, pdproxy uses 0; proxies on several hosts with the same engines need different values of fleet.node_id")
	}
}

// cluster reads the store in which workers register.
func (r *trtllm) cluster(root *table) {
	c, e, found := r.sub(root, "disagg_cluster")
	if !found || len(c.entries) == 0 {
		return
	}
	r.clustered = true
	uri, at, ok := r.text(c, "cluster_uri")
	switch {
	case !ok:
		r.problem(r.file, e.line, "disagg_cluster.cluster_uri", "is required")
	case strings.Contains(uri, "@"):
		r.problem(r.file, at.line, "disagg_cluster.cluster_uri", "must not contain a user or password")
	case strings.HasPrefix(uri, "https://"):
		r.problem(r.file, at.line, "disagg_cluster.cluster_uri", "pdproxy has no storage over https: want etcd:// or http://")
	default:
		r.doc.set("discovery.trtllm", "cluster_uri", text(uri), "disagg_cluster.cluster_uri")
	}
	if strings.HasPrefix(uri, "http://") {
		r.warn(r.file, at.line, "disagg_cluster.cluster_uri", "pdproxy serves the storage on a separate address: choose another port than that of server.listen, and give the workers the new address")
		if host, _, err := net.SplitHostPort(strings.TrimPrefix(uri, "http://")); err == nil && !loopback(host) {
			r.doc.set("discovery.trtllm", "open", value("true"), "as in TensorRT-LLM: any host that can reach the address can receive prompts; better: token_file, if the workers support it")
		}
	}
	name, _, _ := r.text(c, "cluster_name")
	r.doc.set("discovery.trtllm", "cluster_name", text(name), "disagg_cluster.cluster_name")
	minimal, at, found := r.sub(c, "minimal_instances")
	r.integer(minimal, "context_servers", 0, 1<<20)
	r.integer(minimal, "generation_servers", 0, 1<<20)
	if found {
		r.doc.note(at.line, "disagg_cluster.minimal_instances", "pdproxy serves requests as soon as one engine of each role is ready")
	}
	for _, key := range []string{"heartbeat_interval_sec", "inactive_timeout_sec"} {
		if _, e, ok := r.integer(c, key, 0, 1<<20); ok {
			r.doc.note(e.line, "disagg_cluster."+key, "is for the workers: they set their own leases")
		}
	}
	for _, t := range []*table{c, minimal} {
		for _, left := range t.entries {
			r.problem(r.file, left.line, t.name(left.key), "unknown key")
		}
	}
}

// behaviour reads the settings of retries, the order of the legs and short prompts.
func (r *trtllm) behaviour(root *table) {
	if n, _, ok := r.integer(root, "max_retries", 0, 1000); ok {
		r.doc.set("retry", "attempts", number(n+1), "max_retries and the first try; pdproxy uses another engine each time")
	} else {
		r.doc.set("retry", "attempts", number(2), "max_retries is 1 in TensorRT-LLM; pdproxy uses another engine each time")
	}
	style, e, ok := r.text(root, "schedule_style")
	switch {
	case !ok || style == "":
	case style == "context_first" || style == "generation_first":
		r.doc.set("trtllm", "schedule_style", text(style), "schedule_style")
	default:
		r.problem(r.file, e.line, "schedule_style", "want context_first or generation_first")
	}
	c, _, found := r.sub(root, "conditional_disagg_config")
	found = found && len(c.entries) > 0 // {} disables it in TensorRT-LLM
	if n, _, ok := r.integer(c, "max_local_prefill_length", 0, 1<<40); found {
		r.conditional = true
		r.doc.set("policy", "plan", text("pd_auto"), "conditional_disagg_config")
		if !ok {
			n = 0 // TensorRT-LLM's default
		}
		r.doc.set("policy.params.pd_auto", "local_tokens", float(float64(n)), "max_local_prefill_length; without local_tokens pdproxy compares measured times")
		if style == "generation_first" {
			r.warn(r.file, e.line, "schedule_style", "in TensorRT-LLM conditional_disagg_config works only with context_first")
		}
	}
	for _, left := range c.entries {
		r.problem(r.file, left.line, c.name(left.key), "unknown key")
	}
	if e, found := root.take("internal_request_auth_key"); found {
		r.doc.section("trtllm").lines = append(r.doc.section("trtllm").lines, entry{
			key: "auth_key_file", value: text("trtllm.key"), comment: "a file that holds internal_request_auth_key", sample: true,
		})
		r.warn(r.file, e.line, "internal_request_auth_key", "pdproxy import does not copy the key: write it into a file and name the file in trtllm.auth_key_file; until then workers with the key reject every generation")
	}
	for _, b := range []struct{ key, note string }{
		{"allow_request_chat_template", "pdproxy passes a chat_template of a request to the workers unchanged, and the workers decide"},
		{"gen_tokids_ctxbytes", "pdproxy passes token ids as a list of numbers; the answers are the same"},
		{"gen_strip_message_history", "pdproxy sends all messages to generation, which reads the token ids instead"},
	} {
		if on, e, ok := r.boolean(root, b.key); ok && on {
			r.doc.note(e.line, b.key, "%s", b.note)
		}
	}
}

// observability reads the settings of metrics and traces.
func (r *trtllm) observability(root *table) {
	r.integer(root, "perf_metrics_max_requests", 0, 1<<40)
	on, at, ok := r.boolean(root, "return_perf_metrics")
	_, out, dir := r.text(root, "perf_metrics_output_dir")
	if dir || ok && on {
		r.doc.set("trtllm", "perf_metrics", value("true"), "return_perf_metrics; the workers themselves need it too")
		r.doc.note(max(at.line, out.line), "return_perf_metrics, perf_metrics_output_dir", "GET /perf_metrics and /v1/explain on the admin address show the times, and clients can request them; pdproxy writes no file")
	}
	o, e, found := r.sub(root, "otlp_config")
	r.text(o, "otlp_traces_endpoint")
	for _, left := range o.entries {
		r.problem(r.file, left.line, o.name(left.key), "unknown key")
	}
	if found {
		r.doc.note(e.line, "otlp_config.otlp_traces_endpoint", "set OTEL_EXPORTER_OTLP_ENDPOINT in the environment of pdproxy")
		r.warn(r.file, e.line, "otlp_config.otlp_traces_endpoint", "pdproxy sends spans over HTTP (port 4318 of most collectors), the other proxy over gRPC (4317)")
	}
}
