package config

import "strings"

// Policy names the policies. A name is that of a [[plugin]], of one policy of a
// [[plugin]] with several (plugin/policy), or of a built-in policy; the plugin takes
// precedence.
type Policy struct {
	// Plan chooses the flow of an exchange: auto, always, never or pd_auto.
	// Default "auto".
	Plan string `toml:"plan"`
	// Place chooses the targets: round_robin, least_load, power_of_two,
	// conversation, kv_aware, pair_aware, trtllm_kv_cache_aware,
	// trtllm_conversation, sglang_cache_aware, dynamo_cost, slo_aware, or scores for
	// the weighted scorers of [[scores]].
	// Default "least_load".
	Place string `toml:"place"`
	// Mint issues the disagg ids: snowflake. Default "snowflake".
	Mint string `toml:"mint"`
	// Retain decides how long a bidirectional decode engine retains the KV of a turn for the next
	// turn: likely (while the next turn is likely), lease (until the engine's lease ends) or none.
	// Default "likely".
	Retain string `toml:"retain"`
	// Evict decides which running request the proxy ends, so that a waiting request of a higher
	// [[priority_class]] gets its place: lowest_youngest, or none. Only requests of classes with a
	// negative priority are ended. Default "none".
	Evict string `toml:"evict"`
	// Order lists several plan policies by priority. The first one that does not pass
	// decides; Plan comes last. Default empty: only Plan.
	Order []string `toml:"order"`
	// Runtime is the runtime of the built-in policies: "wasm", or "native" for the same
	// policies compiled into the proxy. Filters always run in Wasm. Default "wasm".
	Runtime string `toml:"runtime"`
	// Params are the parameters of built-in policies, by the policy's name and
	// the parameter's; their READMEs list them. A table in the table of a policy has
	// one number for each of several labels: label_micros = { zone = 20_000 } is the
	// parameter label_micros.zone. Default {}: all at their defaults.
	Params map[string]map[string]float64 `toml:"params"`
}

// The purpose of a plugin.
const (
	PhasePolicy = "policy"
	PhaseFilter = "filter"
)

// Plugin is one Wasm module and how it is run.
type Plugin struct {
	// Name is the plugin's name in [policy], metrics and logs: letters,
	// digits and - _ . : @, unique. Required.
	Name string `toml:"name"`
	// Path is the file of the module, its http or https URL,
	// oci://REGISTRY/REPOSITORY with :TAG or @sha256:DIGEST, or builtin:stable_prefix for
	// the built-in filter stable_prefix. Required. A file that changes is loaded again. A relative path begins at the working directory of
	// the process, not at the folder of this file.
	Path string `toml:"path"`
	// SHA256 is the digest, 64 hex digits, that the file must have. Default
	// "": any.
	SHA256 string `toml:"sha256"`
	// PublicKey is the public key of minisign, as the second line of its .pub file,
	// that must have signed the module. Default "": no signature is needed.
	PublicKey string `toml:"public_key"`
	// Signature is the path or http or https URL of the signature. It needs
	// PublicKey. Default "": Path with the suffix .minisig; for oci:// the signature
	// in the artifact.
	Signature string `toml:"signature"`
	// Trusted leaves out the checks of time, tables and call stack. The code is a little faster, but
	// a loop in it stops the whole process. Default false.
	Trusted bool `toml:"trusted"`
	// Phase is the kind of the plugin: "policy" or "filter". Default "policy".
	Phase string `toml:"phase"`
	// Config is the text that the plugin gets as its configuration. Default "". It may
	// contain secrets.
	Config string `toml:"config"`
	// Fail is the effect of a failed filter on a stream: "closed" ends it with an
	// error, "open" continues without the filter. Default "": closed. It may not be set
	// for a policy: policies have fallbacks.
	Fail string `toml:"fail"`
	// VMID keys shared data and queues. Default "". Plugins with the same vm_id share them. A plugin
	// cannot use the queue of another vm_id by its id. A plugin that resolves the queue by vm_id and
	// name may add items, but cannot remove any.
	VMID string `toml:"vm_id"`
	// RootID is the property plugin_root_id. Default "".
	RootID string `toml:"root_id"`
	// VMConfig is the text that the plugin gets when its VM starts. Default "". It may
	// contain secrets.
	VMConfig string `toml:"vm_config"`
	// HeaderStop selects the data that the filter chain holds back after a stop in the
	// header phase: "all" (headers and body, Envoy's default) or "headers" (the chain
	// delivers the body). Default "all".
	HeaderStop string `toml:"header_stop"`
	// Upstreams are the [[upstream]] names that the plugin may call, "*" for
	// all. Default ["*"]; empty: none.
	Upstreams []string `toml:"upstreams"`
	// HostFunctions are the host functions that the plugin may call, "*" for
	// all. Default ["*"]; empty: none.
	HostFunctions []string `toml:"host_functions"`
	// Timeout is the time budget of one callback. Default "" (0):
	// timeouts.policy for a policy, 1s for a filter.
	Timeout Duration `toml:"timeout"`
	// Memory is the maximum memory of one guest instance, 64KiB (one Wasm page) to
	// 4GiB. Default 64MiB.
	Memory ByteSize `toml:"memory"`
	// HostMemory is the maximum memory that the proxy holds for the plugin outside of
	// its instances, over all instances and streams: HTTP calls with their answers,
	// header lines, body bytes and answers that it adds. 64KiB or more. Default 64MiB.
	HostMemory ByteSize `toml:"host_memory"`
	// Canary is the share of decisions that a new version makes first, 0 to 1: for
	// CrashWindow, or until it fails and the old version stays. A version that fails on
	// synthetic requests is rejected. For policies only. Default 0: a new version makes
	// all decisions at once.
	Canary float64 `toml:"canary"`
	// CrashBudget is the number of tolerated failures within CrashWindow; one more
	// disables the plugin until it is reloaded. Default 20; 0 disables it at the first
	// failure.
	CrashBudget int `toml:"crash_budget"`
	// CrashWindow is the time over which failures are counted. Default 10s;
	// never 0.
	CrashWindow Duration `toml:"crash_window"`
}

// Remote reports whether the module comes over http(s) or from a registry.
func (p Plugin) Remote() bool {
	return strings.HasPrefix(p.Path, "http://") || strings.HasPrefix(p.Path, "https://") || p.InRegistry()
}

// InRegistry reports whether the module is an artifact in a registry.
func (p Plugin) InRegistry() bool { return strings.HasPrefix(p.Path, "oci://") }

// Builtin returns the name of the built-in filter that Path names, such as stable_prefix of
// builtin:stable_prefix.
func (p Plugin) Builtin() (name string, ok bool) { return strings.CutPrefix(p.Path, "builtin:") }

// Upstream is an address that plugins may call by name.
type Upstream struct {
	// Name is the plugin's name for it, unique; any printable text without spaces, so
	// that cluster names of other hosts fit. Required.
	Name string `toml:"name"`
	// URL is its http or https address. Required.
	URL string `toml:"url"`
}

func defaultPolicy() Policy {
	return Policy{Plan: "auto", Place: "least_load", Mint: "snowflake", Retain: "likely", Evict: EvictNone, Runtime: "wasm", Params: map[string]map[string]float64{}}
}

// DefaultPlugin returns a [[plugin]] whose keys are all at their defaults.
func DefaultPlugin() Plugin {
	return Plugin{
		Phase:         PhasePolicy,
		HeaderStop:    "all",
		Upstreams:     []string{"*"},
		HostFunctions: []string{"*"},
		Memory:        64 << 20,
		HostMemory:    64 << 20,
		CrashBudget:   20,
		CrashWindow:   seconds(10),
	}
}

// builtinPlans, builtinPlaces, builtinMints, builtinRetains and builtinEvicts list the built-in names for [policy].
func builtinPlans() []string { return []string{"auto", "always", "never", "pd_auto"} }

func builtinPlaces() []string {
	return []string{
		"round_robin", "least_load", "power_of_two", "conversation", "kv_aware", "pair_aware",
		"trtllm_kv_cache_aware", "trtllm_conversation", "sglang_cache_aware", "dynamo_cost", "slo_aware", PlaceScores,
	}
}

func builtinMints() []string { return []string{"snowflake"} }

func builtinRetains() []string { return []string{"likely", "lease", "none"} }

// EvictNone is the value of policy.evict with which no running request is ended.
const EvictNone = "none"

func builtinEvicts() []string { return []string{EvictNone, "lowest_youngest"} }

// builtinFilters lists the built-in filters for plugin.path.
func builtinFilters() []string { return []string{"stable_prefix"} }
