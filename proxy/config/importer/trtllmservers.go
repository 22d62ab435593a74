package importer

import (
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/pdproxy/pdproxy/proxy/config"
)

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

// urls reads the addresses of a section.
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
