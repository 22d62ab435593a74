package config

import (
	"path"
	"slices"
	"strings"
)

// managementParts are parts of paths by which engines are managed, and managementWords are
// whole words of such paths. Sources: vLLM entrypoints/serve/*/api_router.py, SGLang
// srt/entrypoints/http_server.py, TensorRT-LLM serve/openai_server.py.
var (
	managementParts = []string{
		"abort", "adapter", "bootstrap", "collective", "config", "expert", "flush", "freeze", "health", "internal", "kv_", "lora", "memory",
		"metric", "pause", "profil", "rpc", "server_info", "session", "shutdown", "sleep", "wake", "weight", "world_size",
	}
	managementWords = []string{
		"admin", "cache", "clear", "cluster", "continue", "corpus", "debug", "destroy", "docs", "dump", "dumper", "gc", "hicache", "info", "init", "is", "load", "loads",
		"log", "logging", "offset", "perf", "ping", "register", "reload", "remove", "reset", "resume", "role", "route", "scale", "scaling", "set", "sim", "slow", "start", "state", "stop",
		"switch", "unload", "unregister", "update", "version",
	}
)

// managementPart returns the part of a path that names a management route; "" if none does.
func managementPart(route string) string {
	route = strings.ToLower(route)
	for _, part := range managementParts {
		if strings.Contains(route, part) {
			return part
		}
	}
	for word := range strings.FieldsFuncSeq(route, func(c rune) bool { return c == '/' || c == '_' || c == '-' || c == '.' }) {
		if slices.Contains(managementWords, word) {
			return word
		}
	}
	return ""
}

// engineRoutes checks server.engine_routes.
func (k *checker) engineRoutes() {
	routes := k.config.Server.EngineRoutes
	for i, route := range routes {
		key := indexKey("server.engine_routes", i)
		switch part := managementPart(route); {
		case len(route) < 2 || route[0] != '/' || path.Clean(route) != route || strings.ContainsFunc(route, notOfPath):
			k.add(key, "must be the exact path of a route, such as /generative_scoring, found %q", route)
		case strings.HasPrefix(route+"/", "/v1/models/") || strings.HasPrefix(route, "/v1/responses/"):
			k.add(key, "%q is a route of the proxy", route)
		case part != "":
			k.add(key, "%q manages engines (%q): clients must not reach such a route", route, part)
		case slices.Contains(routes[:i], route):
			k.add(key, "%q is listed twice", route)
		}
	}
}

// notOfPath reports whether a character cannot stand in the path of a route.
func notOfPath(c rune) bool {
	return !(c-'0' < 10 && c >= '0' || c|0x20 >= 'a' && c|0x20 <= 'z' || strings.ContainsRune("/_-.~", c))
}
