package config

import (
	"path"
	"slices"
	"strings"
	"unicode"
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
		"admin", "cache", "clear", "cluster", "continue", "control", "corpus", "debug", "destroy", "docs", "dump", "dumper", "gc", "hicache", "info", "init", "is", "load", "loads",
		"log", "logging", "offset", "perf", "ping", "register", "reload", "remove", "reset", "resume", "role", "route", "scale", "scaling", "set", "sim", "slow", "start", "state", "stop",
		"subscribe", "switch", "unload", "unregister", "update", "version",
	}
)

// managementPart returns the part of a path that names a management route; "" if none does.
func managementPart(route string) string {
	lower := strings.ToLower(route)
	for _, part := range managementParts {
		if strings.Contains(lower, part) {
			return part
		}
	}
	var words strings.Builder // the names of gRPC methods have their words in capitals: ResetPrefixCache
	for _, c := range route {
		if unicode.IsUpper(c) {
			words.WriteByte('_')
		}
		words.WriteRune(unicode.ToLower(c))
	}
	for word := range strings.FieldsFuncSeq(lower+"/"+words.String(), func(c rune) bool { return c == '/' || c == '_' || c == '-' || c == '.' }) {
		if slices.Contains(managementWords, word) {
			return word
		}
	}
	return ""
}

// Passes reports whether the picker may pass a request for the decoded path of no endpoint to an
// engine. It refuses paths by which engines are managed, and paths that an engine could read as
// another path: Starlette's routes match a path with a line feed at its end too.
func (e *EPP) Passes(decoded string) bool {
	clean := path.Clean(decoded)
	if len(clean) > 1 && strings.HasSuffix(decoded, "/") {
		clean += "/"
	}
	control := func(c rune) bool { return c < ' ' || c == 0x7f || c == '\\' }
	return e.PassThrough && decoded != "" && decoded[0] == '/' && clean == decoded && !strings.ContainsFunc(decoded, control) && managementPart(decoded) == ""
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
