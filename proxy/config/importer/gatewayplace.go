package importer

import (
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// place chooses the place policy. pdproxy has one policy for both legs.
func (g *gateway) place(known []string) {
	main, ok := g.policy("policy", known)
	if !ok {
		main = "cache_aware"
	}
	prefill, decode := main, main
	if p, ok := g.policy("prefill-policy", known); ok && g.disaggregated {
		prefill = p
	}
	if p, ok := g.policy("decode-policy", known); ok && g.disaggregated {
		decode = p
	}
	place, why := placeOf(prefill)
	g.doc.set("policy", "place", text(place), strings.TrimSuffix(prefill+" of "+g.name+"; "+why, "; "))
	if other, _ := placeOf(decode); other != place {
		g.doc.note(g.line("decode-policy"), "--decode-policy", "%s: pdproxy places both legs by one policy; the result has the policy of prefill (decode alone: %s)", decode, other)
	}
	if place == "conversation" {
		g.conversation()
	}
	if place == "sglang_cache_aware" {
		g.cacheParams()
		return
	}
	for _, flag := range []string{"cache-threshold", "balance-abs-threshold", "balance-rel-threshold"} {
		if g.on(flag) {
			g.doc.note(g.line(flag), "--"+flag, "has no effect without cache_aware for prefill")
		}
	}
}

// policy returns the value of a policy flag.
func (g *gateway) policy(flag string, known []string) (string, bool) {
	p, ok := g.text(flag)
	if ok && !slices.Contains(known, p) {
		g.problem(g.file, g.line(flag), "--"+flag, "unknown policy: want one of %s", strings.Join(known, ", "))
		return "", false
	}
	return p, ok
}

// placeOf returns the place policy for one of the gateways' policies, and an
// explanation for the operator.
func placeOf(policy string) (place, why string) {
	switch policy {
	case "cache_aware", "prefix_hash":
		return "sglang_cache_aware", "kv_aware counts estimated seconds instead, by the engines' KV events where kv_events is set"
	case "round_robin", "power_of_two":
		return policy, ""
	case "least_load":
		return policy, "by requests and tokens in flight"
	case "bucket":
		return "kv_aware", "it also separates short prompts from long ones"
	case "random", "passthrough":
		return "round_robin", "requests spread just as evenly"
	default: // consistent_hash, rendezvous_hash, consistent_hashing, manual, sticky_*
		return "conversation", "sessions keep their engines by a table, not by a hash"
	}
}

// cacheParams reads the thresholds of cache_aware. Their defaults are the defaults of
// the router's command line.
func (g *gateway) cacheParams() {
	const params = "policy.params.sglang_cache_aware"
	if x, ok := g.float("cache-threshold", 0, 1); ok {
		g.doc.set(params, "cache_threshold", float(x), "--cache-threshold")
	}
	if n, ok := g.integer("balance-abs-threshold", 0, 1_000_000_000); ok {
		g.doc.set(params, "balance_abs_threshold", float(float64(n)), "--balance-abs-threshold")
	}
	if x, ok := g.float("balance-rel-threshold", 1, 1e9); ok {
		g.doc.set(params, "balance_rel_threshold", float(x), "--balance-rel-threshold")
	}
}

// conversation reads the names of the headers and body members that identify a session.
func (g *gateway) conversation() {
	c := config.Default().Conversation
	if len(g.defaults.fields) > 0 {
		g.doc.set("conversation", "fields", list(append(slices.Clone(g.defaults.fields), c.Fields...)), "body members with the session's name in the router")
	}
	if len(g.defaults.headers) > 0 {
		g.doc.set("conversation", "headers", list(firstOf(g.defaults.headers, c.Headers)), "request headers with the session's name in the router")
	}
}

// firstOf returns first, and then those of the names that are not in first.
func firstOf(first, names []string) []string {
	all := slices.Clone(first)
	for _, name := range names {
		if !slices.Contains(first, name) {
			all = append(all, name)
		}
	}
	return all
}
