package importer

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Types of TensorRT-LLM's routers (tensorrt_llm/serve/router.py).
const (
	routerRoundRobin   = "round_robin"
	routerLoad         = "load_balancing"
	routerKV           = "kv_cache_aware"
	routerConversation = "conversation"
)

// router is one section's router.
type router struct {
	kind string
	line int
	// maxBatch and blockTokens are 0 if they are not set.
	maxBatch, blockTokens int
	maxSessions           int
}

// shared reports whether both sections have the same router object: an alias, or one
// inherited from the top level.
func shared(ctx, gen *table) bool {
	a, inContext := ctx.find("router")
	b, inGeneration := gen.find("router")
	return inContext && inGeneration && resolve(a.value) == resolve(b.value)
}

// router reads a section's router. sharedType: the other section has read the same
// object. The orchestrator removes the type from a shared object, so the second section
// finds no type.
func (r *trtllm) router(s *server, sharedType bool) router {
	args, e, _ := r.sub(s.table, "router")
	out := router{kind: routerRoundRobin, line: e.line}
	if kind, at, ok := r.text(args, "type"); ok {
		out.kind, out.line = strings.ToLower(kind), at.line
		if !slices.Contains([]string{routerRoundRobin, routerLoad, routerKV, routerConversation}, out.kind) {
			r.problem(r.file, at.line, args.name("type"), "%q: want round_robin, load_balancing, kv_cache_aware or conversation", kind)
		}
	}
	if sharedType && out.kind != routerRoundRobin {
		r.warn(r.file, out.line, s.name("router"), "is the same object as the router of context_servers: in TensorRT-LLM generation_servers lose its type and use round_robin")
		out.kind = routerRoundRobin
	}
	s.keepNames("max_batch_size", "max_num_tokens", "kv_cache_config")
	out.maxBatch, _, _ = r.integer(s.table, "max_batch_size", 1, maxBatch)
	r.integer(s.table, "max_num_tokens", 1, 1<<40)
	if n, _, ok := r.integer(args, "max_batch_size", 1, maxBatch); ok && out.maxBatch == 0 {
		out.maxBatch = n
	}
	out.blockTokens = r.blockTokens(s.table, args)
	if on, at, ok := r.boolean(args, "use_tokens"); ok && on {
		r.useTokens(s, args, at.line)
	}
	if out.kind == routerConversation {
		out.maxSessions, _, _ = r.integer(args, "max_sessions", 1, 1<<40)
	}
	r.arguments(args)
	return out
}

// blockTokens returns the router's tokens_per_block, or the workers'.
func (r *trtllm) blockTokens(section, args *table) int {
	kv, _, _ := r.sub(section, "kv_cache_config")
	workers, _, _ := r.integer(kv, "tokens_per_block", 1, 1<<20)
	own, at, ok := r.integer(args, "tokens_per_block", 1, 1<<20)
	if ok && workers > 0 && own != workers {
		r.warn(r.file, at.line, args.name("tokens_per_block"), "differs from kv_cache_config: TensorRT-LLM would never find a block; the result has the value of kv_cache_config")
	}
	if workers > 0 {
		return workers
	}
	return own
}

// useTokens handles an option that raises an exception for chats, and for every request
// of the generation side.
func (r *trtllm) useTokens(s *server, args *table, line int) {
	if s.prefix == "d" {
		r.problem(r.file, line, args.name("use_tokens"), "true makes every request of the generation side fail in TensorRT-LLM: remove it")
		return
	}
	r.warn(r.file, line, args.name("use_tokens"), "fails for chats in TensorRT-LLM; pdproxy's policies always know the tokens in flight")
}

// arguments writes the remaining arguments of a router as comments. It omits the values
// of arguments with names like those of secrets.
func (r *trtllm) arguments(args *table) {
	for _, e := range args.entries {
		n := resolve(e.value)
		switch {
		case n.Kind != yaml.ScalarNode || secretName(e.key):
			r.doc.note(e.line, args.name(e.key), "has no equivalent; pdproxy import omits the value")
		default:
			r.doc.note(e.line, args.name(e.key), "%s has no equivalent: the policy places without it", string(text(n.Value)))
		}
	}
}

// secretName reports whether a key's name is that of a secret.
func secretName(key string) bool {
	key = strings.ToLower(key)
	for _, part := range []string{"secret", "password", "passwd", "credential", "api_key", "auth_key", "_url", "_uri"} {
		if strings.Contains(key, part) {
			return true
		}
	}
	return strings.HasSuffix(key, "token") || strings.HasSuffix(key, "_key")
}

// place chooses the one policy that places both legs in pdproxy. In TensorRT-LLM each
// side has its own router.
func (r *trtllm) place(ctx, gen *server) {
	a, b := ctx.router, gen.router
	from := "routers " + a.kind + " and " + b.kind
	has := func(kind string) bool { return a.kind == kind || b.kind == kind }
	switch {
	case has(routerConversation):
		r.doc.set("policy", "place", text("conversation"), from+"; trtllm_conversation has the rule of TensorRT-LLM, for comparison")
		if n := max(a.maxSessions, b.maxSessions); n > 0 {
			r.doc.set("conversation", "capacity", number(min(n, maxConversations)), "max_sessions")
		}
		if has(routerKV) {
			r.doc.note(max(a.line, b.line), "router kv_cache_aware", "this policy uses the conversation's home only; place = \"kv_aware\" also uses the cached blocks")
		}
	case has(routerKV):
		r.doc.set("policy", "place", text("trtllm_kv_cache_aware"), from+"; the score of TensorRT-LLM; kv_aware counts estimated seconds instead")
		r.batch(a, b)
		r.warn(r.file, max(a.line, b.line), "router", "workers have events only with kv_cache_config.event_buffer_max_size above 0; otherwise neither proxy ever finds a block")
		r.warn(r.file, max(a.line, b.line), "router", "a worker gives each event of /kv_cache_events to one poller only: if both proxies poll the worker, each of them misses blocks")
	case has(routerLoad):
		r.doc.set("policy", "place", text("least_load"), from)
	default:
		r.doc.set("policy", "place", text("round_robin"), from)
	}
	if a.kind != b.kind {
		r.doc.note(max(a.line, b.line), "router", "%s of context_servers and %s of generation_servers: one policy places both legs", a.kind, b.kind)
	}
}

// maxBatch is the maximum of the policy's max_batch_size.
const maxBatch = 1_000_000

// maxConversations is the maximum of conversation.capacity.
const maxConversations = 10_000_000

// batch sets the only configurable number of the routers' score.
func (r *trtllm) batch(a, b router) {
	n := a.maxBatch
	if a.kind != routerKV || n == 0 {
		n = b.maxBatch
	}
	if n > 0 {
		r.doc.set("policy.params.trtllm_kv_cache_aware", "max_batch_size", float(float64(n)), "max_batch_size")
	}
	if a.kind == routerKV && b.kind == routerKV && a.maxBatch > 0 && b.maxBatch > 0 && a.maxBatch != b.maxBatch {
		r.doc.note(b.line, "generation_servers.max_batch_size", "%d; one number holds for both legs", b.maxBatch)
	}
}
