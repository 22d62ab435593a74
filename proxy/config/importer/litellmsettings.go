package importer

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// liteSetting is a setting of LiteLLM without an equivalent.
type liteSetting struct {
	consequence string
	// lost: the setting changes what a request does.
	lost bool
}

// liteSettings are the settings without an equivalent, by their key.
func liteSettings() map[string]liteSetting {
	const store = "the proxy keeps no state outside of its process and its [fleet]"
	const log = "the proxy has logs, metrics and spans of its own: see docs/howto/operate.md"
	const cache = "the proxy keeps no answers: an engine computes each request"
	const retry = "the result has one number of retries for all models and errors: retry.attempts"
	const budget = "the proxy counts no costs; server.auth.keys_file limits a key by rpm=, tpm= and max="
	const capacity = "chooses deployments by their free rate; the proxy by the load of the engines"
	const files = "the proxy stores no files, batches and tunings: requests to /v1/files, /v1/batches and /v1/fine_tuning get 404"
	const body = "the proxy adds no fields to requests: clients must send it, or a filter plugin can add it"
	const auth = "the proxy does not check clients this way: list their keys in server.auth.keys_file, or their issuer in [[jwt]]"
	const guard = "the proxy checks no contents: a filter plugin can"
	const timeout = "the time-outs of all models are in [timeouts]"
	const admin = "there is no user interface and no database; the admin address has the commands"
	const scope = "all engines of a model can get each of its requests"
	lost := func(consequence string) liteSetting { return liteSetting{consequence, true} }
	left := func(consequence string) liteSetting { return liteSetting{consequence: consequence} }
	return map[string]liteSetting{
		"rpm": left(capacity), "tpm": left(capacity), "files_settings": lost(files), "finetune_settings": lost(files),
		"pass_through_endpoints": lost("the proxy has no routes to other services: requests to these paths get 404"), "max_retries": lost(retry), "num_retries": lost(retry),
		"temperature": lost(body), "max_tokens": lost(body), "top_p": lost(body), "extra_body": lost(body), "extra_headers": lost(body),
		"stop": lost(body), "seed": lost(body), "presence_penalty": lost(body), "frequency_penalty": lost(body),
		"timeout": left(timeout), "stream_timeout": left(timeout), "tags": lost(scope), "enable_tag_filtering": lost(scope),
		"input_cost_per_token": left(budget), "output_cost_per_token": left(budget), "max_budget": lost(budget), "budget_duration": lost(budget),
		"order":        left("an engine has no order: [policy] place chooses by load"),
		"drop_params":  left("the proxy passes the fields of a request on: an engine refuses or ignores those that it does not know"),
		"retry_policy": lost(retry), "model_group_retry_policy": lost(retry), "allowed_fails_policy": lost(retry),
		"retry_after":            left("a retry goes to another engine at once"),
		"enable_pre_call_checks": left("the engine refuses a prompt that is too long"),
		"redis_host":             left(store), "redis_port": left(store), "redis_password": left(store), "redis_url": left(store), "redis_db": left(store),
		"cache": left(cache), "cache_params": left(cache), "cache_responses": left(cache), "cache_kwargs": left(cache), "caching_groups": left(cache),
		"callbacks": left(log), "success_callback": left(log), "failure_callback": left(log), "service_callback": left(log), "json_logs": left(log),
		"set_verbose": left(log), "debug_level": left(log), "telemetry": left(log), "turn_off_message_logging": left(log), "callback_settings": left(log),
		"alerting": left(log), "alerting_threshold": left(log), "alerting_args": left(log), "redact_user_api_key_info": left(log),
		"guardrails": lost(guard), "mcp_servers": lost("the proxy calls no tools"), "include": lost("the proxy import reads no other files: add their text to this one"),
		"provider_budget_config": lost(budget), "default_max_internal_user_budget": lost(budget), "max_internal_user_budget": lost(budget), "default_team_settings": left(log),
		"custom_auth": lost(auth), "enable_jwt_auth": lost(auth), "litellm_jwtauth": lost(auth), "enable_oauth2_auth": lost(auth), "allowed_ips": lost("the proxy admits clients by key or certificate, not by address"),
		"database_url": left(admin + "; keys of the database are not imported"), "store_model_in_db": left(admin + "; models of the database are not imported"), "proxy_batch_write_at": left(admin), "database_connection_pool_limit": left(admin), "disable_spend_logs": left(admin), "ui_access_mode": left(admin),
		"background_health_checks": left("the proxy always probes engines: [health]"), "health_check_interval": left("the proxy always probes engines: health.interval"),
		"environment_variables": left("pdproxy reads no variables of LiteLLM"),
		"model_info":            left("is information for LiteLLM's clients and its cost accounts: the proxy has no place for it"),
	}
}

// limits reads the limits that hold for all deployments, before the deployments.
func (l *liteLLM) limits(general, router *table) {
	if n, _, ok := l.integer(router, "default_max_parallel_requests", 1, 1<<30); ok {
		l.most = n
	}
	for _, key := range []string{"global_max_parallel_requests", "max_parallel_requests"} {
		if n, _, ok := l.integer(general, key, 1, 1<<30); ok {
			l.doc.set("limits", "max_exchanges", number(n), key)
			break
		}
	}
	if n, _, ok := l.integer(general, "max_request_size_mb", 1, 1<<20); ok {
		l.doc.set("server", "max_body", text(config.ByteSize(n<<20).String()), "max_request_size_mb")
	}
}

// keys reads the key of clients. Without it, LiteLLM asks no client for a key.
func (l *liteLLM) keys(general *table) {
	e, found := general.take("master_key")
	if !found {
		return
	}
	l.doc.section("server.auth").sampleKey("keys_file", text("keys"), "master_key and virtual keys: one line \"name sha256hex\" for each key, made by pdproxy keys new")
	l.lose(l.doc, l.file, e.line, "general_settings.master_key", "clients of the result need no key, because pdproxy import writes no keys: make a file by pdproxy keys new and name it in server.auth.keys_file")
}

// params notes the parameters of a deployment that are left.
func (l *liteLLM) params(params *table, name string) {
	l.drop(params, "model_list "+name+", ")
}

// left notes the keys that are left in an entry of model_list.
func (l *liteLLM) left(t *table, consequence string) {
	for _, e := range t.entries {
		l.doc.note(e.line, t.name(e.key), "%s", consequence)
	}
}

// unused notes the other keys of a section.
func (l *liteLLM) unused(t *table) {
	prefix := ""
	if t.path != "" {
		prefix = t.path + "."
	}
	l.drop(t, prefix)
}

// drop notes the keys that are left in a table.
func (l *liteLLM) drop(t *table, prefix string) {
	known := liteSettings()
	for _, e := range t.entries {
		if emptyValues(e.value) || off(e) {
			continue
		}
		s, found := known[e.key]
		if e.key == "optional_pre_call_checks" && slices.ContainsFunc(resolve(e.value).Content, isRateCheck) {
			// Without this check, rpm and tpm only choose deployments
			// (docs/my-website/docs/proxy/load_balancing.md).
			s, found = liteSetting{"the rates of deployments (rpm, tpm) are no limits in the proxy: rpm= and tpm= in server.auth.keys_file limit each client's key", true}, true
		}
		if !found {
			s.consequence = "has no equivalent in pdproxy"
		}
		if s.lost {
			l.lose(l.doc, l.file, e.line, prefix+e.key, "%s", s.consequence)
		} else {
			l.doc.note(e.line, prefix+e.key, "%s", s.consequence)
		}
	}
}

// isRateCheck reports whether a check makes the rates of deployments hard limits.
func isRateCheck(n *yaml.Node) bool { return n.Value == "enforce_model_rate_limits" }

// off reports whether a setting is switched off.
func off(e tableEntry) bool { return strings.EqualFold(resolve(e.value).Value, "false") }
