package importer

import (
	"net/url"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// LiteLLM converts the config.yaml of LiteLLM's proxy. Deployments of engines with the OpenAI API
// become engines; deployments of cloud providers are left out. Keys and defaults are those of
// docs.litellm.ai/docs/proxy/config_settings.
func LiteLLM(f File) (Result, error) {
	l := &liteLLM{yamlFile: yamlFile{report: &report{}, file: f.Name}, doc: &document{from: "a config.yaml of LiteLLM"}}
	if root, ok := l.document(f); ok {
		l.read(root)
	}
	return l.finish(f.Name, l.doc)
}

type liteLLM struct {
	yamlFile
	doc *document
	// seen holds the addresses of the engines, each with its model.
	seen map[string]string
}

// localProviders are the prefixes of models that an engine with the OpenAI API serves.
var localProviders = []string{"hosted_vllm", "vllm", "openai", "text-completion-openai", "custom_openai", "openai_like", "litellm_proxy"}

func (l *liteLLM) read(root *table) {
	l.doc.set("server", "listen", text("0.0.0.0:4000"), "the default of litellm --host and --port")
	l.seen = map[string]string{}
	nodes, _, _ := l.list(root, "model_list")
	for _, node := range nodes {
		l.deployment(l.table("model_list", node), node.Line)
	}
	settings, _, _ := l.sub(root, "litellm_settings")
	router, _, _ := l.sub(root, "router_settings")
	general, _, _ := l.sub(root, "general_settings")
	l.place(router)
	l.retries(router, settings)
	l.circuits(router, settings)
	l.timeouts(router, settings)
	l.keys(general)
	for _, t := range []*table{router, settings, general} {
		l.unused(t)
	}
	root.take("environment_variables")
	for _, e := range root.entries {
		l.doc.note(e.key, "is not used")
	}
	if l.doc.engines() == 0 && len(l.problems) == 0 {
		l.warn(l.file, 0, "model_list", "the input names no engine")
	}
}

// deployment reads one entry of model_list.
func (l *liteLLM) deployment(t *table, line int) {
	name, _, _ := l.text(t, "model_name")
	params, _, _ := l.sub(t, "litellm_params")
	model, _, ok := l.text(params, "model")
	if !ok {
		l.problem(l.file, line, "model_list.litellm_params.model", "is required")
		return
	}
	provider, served, prefixed := strings.Cut(model, "/")
	if own, _, ok := l.text(params, "custom_llm_provider"); ok {
		provider, served = own, strings.TrimPrefix(model, own+"/")
	} else if !prefixed {
		provider, served = "openai", model
	}
	base, at, ok := l.text(params, "api_base")
	switch {
	case !slices.Contains(localProviders, provider):
		l.doc.note("model_list "+name, "the proxy calls engines with the OpenAI API, not provider %s", provider)
		l.warn(l.file, line, "model_list", "a deployment of provider %s is left out", provider)
		return
	case !ok:
		l.doc.note("model_list "+name, "without api_base, the provider itself serves the model")
		l.warn(l.file, line, "model_list", "a deployment without api_base is left out")
		return
	}
	address, ok := l.address(base, at)
	if !ok {
		return
	}
	if other, found := l.seen[address]; found {
		l.warn(l.file, at.line, "model_list.litellm_params.api_base", "the address is given twice: the result has one engine, which serves %s", text(other))
		return
	}
	l.seen[address] = served
	l.engine(params, address, served, name, line)
}

// engine writes one engine.
func (l *liteLLM) engine(params *table, address, served, name string, line int) {
	e := l.doc.engine()
	e.set("name", text("e"+strconv.Itoa(len(l.seen)-1)), "")
	e.set("url", text(address), "api_base")
	e.set("role", text(config.RoleBoth), "")
	e.set("connector", text(config.ConnectorNone), "")
	e.set("model", text(served), "litellm_params.model")
	if n, _, ok := l.integer(params, "max_parallel_requests", 1, 1<<30); ok {
		e.set("max_conns", number(n), "max_parallel_requests")
	}
	if key, found := params.take("api_key"); found && !slices.Contains([]string{"", "none", "empty", "fake", "dummy"}, strings.ToLower(resolve(key.value).Value)) {
		e.lines = append(e.lines, entry{key: "api_key_file", value: text("engine.key"), sample: true,
			comment: "api_key: put the key into a file of one line and write the path of the file"})
		l.warn(l.file, key.line, "model_list.litellm_params.api_key", "pdproxy import writes no keys: put the key into a file and name the file in engine.api_key_file")
	}
	if name != served && name != "" {
		l.warn(l.file, line, "model_list.model_name", "with LiteLLM clients request %s; with pdproxy they must request %s, the name that the engine serves", text(name), text(served))
	}
	var left []string
	for _, p := range params.entries {
		left = append(left, p.key)
	}
	if len(left) > 0 {
		l.doc.note("litellm_params of "+served, "no equivalent: %s", strings.Join(left, ", "))
	}
}

// address returns the URL of an engine without the path /v1. Its messages never contain
// the URL, which may contain a password.
func (l *liteLLM) address(base string, at tableEntry) (string, bool) {
	const key = "model_list.litellm_params.api_base"
	u, err := url.Parse(base)
	switch {
	case strings.HasPrefix(base, "os.environ/"):
		l.problem(l.file, at.line, key, "is an environment variable: write its value")
	case err != nil || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https":
		l.problem(l.file, at.line, key, "want a URL as http://host:port/v1")
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		l.problem(l.file, at.line, key, "the URL of an engine must not contain a user, password, query or fragment")
	default:
		return u.Scheme + "://" + u.Host + strings.TrimSuffix(strings.TrimRight(u.EscapedPath(), "/"), "/v1"), true
	}
	return "", false
}

// place chooses the place policy by routing_strategy.
func (l *liteLLM) place(router *table) {
	strategy, e, ok := l.text(router, "routing_strategy")
	if !ok {
		strategy = "simple-shuffle"
	}
	place, why := "least_load", "by requests and tokens in flight"
	switch strategy {
	case "simple-shuffle":
		place, why = "round_robin", "requests spread just as evenly; rpm, tpm and weights have no equivalent"
	case "least-busy", "latency-based-routing", "usage-based-routing", "usage-based-routing-v2", "cost-based-routing":
	default:
		l.problem(l.file, e.line, "router_settings.routing_strategy", "unknown strategy")
	}
	l.doc.set("policy", "place", text(place), printable(strategy)+"; "+why)
}

// retries reads num_retries; router_settings has priority.
func (l *liteLLM) retries(router, settings *table) {
	n, _, first := l.integer(router, "num_retries", 0, 999)
	other, _, second := l.integer(settings, "num_retries", 0, 999)
	switch {
	case !first && !second:
		return
	case !first:
		n = other
	}
	l.doc.set("retry", "attempts", number(n+1), "num_retries and the first try; another engine each time")
}

// circuits reads allowed_fails and cooldown_time.
func (l *liteLLM) circuits(router, settings *table) {
	for _, t := range []*table{router, settings} {
		if n, _, ok := l.integer(t, "allowed_fails", 0, 1<<30-1); ok {
			l.doc.set("circuit", "failures", number(n+1), "allowed_fails and one more; pdproxy counts consecutive failures, LiteLLM failures per minute")
			break
		}
	}
	for _, t := range []*table{router, settings} {
		if x, _, ok := l.float(t, "cooldown_time", 0.001, maxSeconds); ok {
			l.doc.set("circuit", "open_for", seconds(x), "cooldown_time")
			break
		}
	}
}

// timeouts reads the limit of a whole request.
func (l *liteLLM) timeouts(router, settings *table) {
	x, _, ok := l.float(router, "timeout", 0.001, maxSeconds)
	other, _, second := l.float(settings, "request_timeout", 0.001, maxSeconds)
	switch {
	case !ok && !second:
		return
	case !ok:
		x = other
	}
	l.doc.set("timeouts", "first_byte", seconds(x), "timeout; the other proxy cuts longer streams, pdproxy does not")
}

// keys notes the keys of clients.
func (l *liteLLM) keys(general *table) {
	e, found := general.take("master_key")
	if !found {
		return
	}
	s := l.doc.section("server.auth")
	s.lines = append(s.lines, entry{key: "keys_file", value: text("keys"), sample: true, comment: "master_key and virtual keys: one line \"name sha256hex\" for each key"})
	l.warn(l.file, e.line, "general_settings.master_key", "pdproxy import writes no keys: list the clients' keys in server.auth.keys_file; until then clients need no key")
}

// unused notes the other keys of a section.
func (l *liteLLM) unused(t *table) {
	traps := map[string]string{
		"fallbacks": "not imported: write it as [[model]] fallback", "context_window_fallbacks": "not imported: write it as [[model]] fallback",
		"default_fallbacks": "not imported: write it as [[model]] fallback", "content_policy_fallbacks": "not imported: write it as [[model]] fallback",
		"model_group_alias": "not imported: write it as [[model]] alias_of; until then clients must ask for the name that the engine serves",
	}
	var names []string
	for _, e := range t.entries {
		if trap, found := traps[e.key]; found && !empty(e.value) {
			l.warn(l.file, e.line, t.name(e.key), "%s", trap)
		}
		names = append(names, e.key)
	}
	if len(names) > 0 {
		l.doc.note(t.path, "no equivalent: %s", strings.Join(names, ", "))
	}
}

// empty reports whether a list or mapping has no entries.
func empty(node *yaml.Node) bool { return len(resolve(node).Content) == 0 }
