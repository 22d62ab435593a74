package importer

import (
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

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

// server is context_servers or generation_servers.
type server struct {
	*table
	prefix, role string // of the engines' names
	router       router
	engines      []trtllmEngine
	// arguments are keys that belong to the workers.
	arguments []tableEntry
}

// keepNames records which of these keys a section itself has. Call keepNames before
// other methods take the keys.
func (s *server) keepNames(keys ...string) {
	for _, key := range keys {
		if e, found := s.find(key); found && !e.inherited {
			s.arguments = append(s.arguments, e)
		}
	}
}

type trtllmEngine struct {
	address string
	line    int
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

// inherit copies top-level keys that do not belong to the orchestrator into both
// sections, as the orchestrator does: a top-level router or urls apply too.
func (r *trtllm) inherit(root, ctx, gen *table) {
	for _, e := range root.entries {
		for _, t := range []*table{ctx, gen} {
			own, found := t.find(e.key)
			if !found {
				inherited := e
				inherited.inherited = true
				t.entries = append(t.entries, inherited)
			} else if !equal(own.value, e.value) {
				r.problem(r.file, own.line, t.name(e.key), "has another value at the top level (line %d)", e.line)
			}
		}
	}
	for _, e := range root.entries {
		if near, ok := nearest(e.key, trtllmKeys()); ok {
			r.warn(r.file, e.line, e.key, "has no effect in TensorRT-LLM; is %s meant?", near)
		}
		if !slices.Contains([]string{"num_instances", "urls", "router"}, e.key) {
			r.doc.note(e.line, e.key, argument)
		}
	}
}

// argument is the consequence of a key that the orchestrator passes to its workers.
const argument = "is an argument of the workers, which keep it: pdproxy does not read it"

// trtllmKeys returns the keys of the top level.
func trtllmKeys() []string {
	return []string{"hostname", "port", "context_servers", "generation_servers", "max_retries", "schedule_style",
		"conditional_disagg_config", "disagg_cluster", "node_id", "num_workers", "disagg_coordinator_url",
		"perf_metrics_max_requests", "return_perf_metrics", "perf_metrics_output_dir", "otlp_config",
		"allow_request_chat_template", "gen_strip_message_history", "gen_tokids_ctxbytes", "internal_request_auth_key",
		"server_keep_alive_timeout"}
}

// servers reads the engines of a section.
func (r *trtllm) servers(s *server) {
	count, at, counted := r.integer(s.table, "num_instances", 0, 1<<20)
	if !counted {
		count = 1
	}
	urls, e, found := r.list(s.table, "urls")
	switch {
	case found && r.clustered:
		r.warn(r.file, e.line, s.name("urls"), "TensorRT-LLM ignores them, because disagg_cluster finds the workers")
	case found:
		r.urls(s, urls)
		if len(urls) != count && len(urls) > 0 {
			r.problem(r.file, max(at.line, e.line), s.name("num_instances"), "is %d, but there are %d urls", count, len(urls))
		}
	}
	for _, left := range s.entries {
		if !left.inherited {
			s.arguments = append(s.arguments, left)
		}
	}
	for _, e := range s.arguments {
		r.doc.note(e.line, s.name(e.key), argument)
	}
}

// list takes a list of strings.
func (y *yamlFile) list(t *table, key string) ([]*yaml.Node, tableEntry, bool) {
	e, found := t.take(key)
	if !found {
		return nil, e, false
	}
	n := resolve(e.value)
	if n.Kind != yaml.SequenceNode {
		y.wrong(t, e, "a list")
		return nil, e, false
	}
	return n.Content, e, true
}

func (r *trtllm) urls(s *server, urls []*yaml.Node) {
	for _, node := range urls {
		n := resolve(node)
		host, port, _ := strings.Cut(n.Value, ":")
		number, err := strconv.Atoi(port)
		switch {
		case n.Kind != yaml.ScalarNode || strings.Contains(n.Value, "@"):
			r.problem(r.file, node.Line, s.name("urls"), "want host:port")
		case strings.Contains(n.Value, "://"):
			r.problem(r.file, node.Line, s.name("urls"), "%q: want host:port, without a scheme", n.Value)
		case host == "" || err != nil || number < 1 || number > 65535:
			r.problem(r.file, node.Line, s.name("urls"), "%q: want host:port (a name or an IPv4 address)", n.Value)
		case slices.ContainsFunc(s.engines, func(e trtllmEngine) bool { return e.address == n.Value }):
			r.warn(r.file, node.Line, s.name("urls"), "%q is given twice: the result has one engine", n.Value)
		default:
			s.engines = append(s.engines, trtllmEngine{n.Value, node.Line})
		}
	}
}

// engines adds the engines. An engine in both sections serves both phases.
func (r *trtllm) engines(ctx, gen *server) {
	mixed := func(e trtllmEngine) bool {
		in := func(s *server) bool {
			return slices.ContainsFunc(s.engines, func(o trtllmEngine) bool { return o.address == e.address })
		}
		return in(ctx) && in(gen)
	}
	for _, s := range []*server{ctx, gen} {
		n := 0
		for _, e := range s.engines {
			both := mixed(e)
			if both && s == gen {
				continue
			}
			role, comment := s.role, ""
			switch {
			case both:
				role, comment = config.RoleBoth, "in both sections"
			case s == gen && r.conditional:
				role, comment = config.RoleBoth, "conditional_disagg_config: the engine also serves whole requests"
			}
			out := r.doc.engine()
			out.set("name", text(s.prefix+strconv.Itoa(n)), "")
			out.set("url", text("http://"+e.address), s.name("urls"))
			out.set("role", text(role), comment)
			out.set("connector", text(config.ConnectorTRTLLM), "")
			if s.router.kind == routerKV || both && gen.router.kind == routerKV {
				out.set("kv_events", text("poll"), "router kv_cache_aware")
			}
			if s.router.blockTokens > 0 {
				out.set("block_tokens", number(s.router.blockTokens), "tokens_per_block")
			}
			n++
		}
	}
}
