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
// become engines, those of OpenAI itself remotes; deployments of other providers are left out.
// Keys and defaults are those of docs.litellm.ai/docs/proxy/config_settings.
func LiteLLM(f File) (Result, error) {
	r := &report{}
	if !r.accepts(f, "litellm") {
		return Result{}, r.problems
	}
	l := &liteLLM{yamlFile: yamlFile{report: r, file: f.Name}, doc: &document{from: "a config.yaml of LiteLLM"},
		engines: map[string]*liteEngine{}, groups: map[string]*liteGroup{}}
	if root, ok := l.document(f); ok {
		l.read(root)
	}
	return l.finish(f.Name, l.doc)
}

type liteLLM struct {
	yamlFile
	doc *document
	// engines holds the engines by their address.
	engines   map[string]*liteEngine
	addresses []string
	// groups holds the model_names of the file.
	groups map[string]*liteGroup
	names  []string
	// most is the limit of running requests of each deployment without its own; 0: none.
	most int
}

// liteEngine is an address with the models that the file requests there.
type liteEngine struct {
	served []string
	most   int
	key    bool // requests carry a key
}

// localProviders are the prefixes of models that an engine with the OpenAI API serves.
var localProviders = []string{"hosted_vllm", "vllm", "openai", "text-completion-openai", "custom_openai", "openai_like", "litellm_proxy"}

func (l *liteLLM) read(root *table) {
	l.doc.set("server", "listen", text("0.0.0.0:4000"), "the default of litellm --host and --port")
	settings, _, _ := l.sub(root, "litellm_settings")
	router, _, _ := l.sub(root, "router_settings")
	general, _, _ := l.sub(root, "general_settings")
	l.limits(general, router)
	nodes, _, _ := l.list(root, "model_list")
	for _, node := range nodes {
		l.deployment(l.table("model_list", node), node.Line)
	}
	l.writeEngines()
	l.models(router, settings)
	l.place(router)
	l.retries(router, settings)
	l.circuits(router, settings)
	l.timeouts(router, settings)
	l.keys(general)
	for _, t := range []*table{router, settings, general} {
		l.unused(t)
	}
	l.unused(root)
	if len(l.groups) == 0 && len(l.problems) == 0 {
		l.warn(l.file, 0, "model_list", "the input names no engine")
	}
}

// deployment reads one entry of model_list.
func (l *liteLLM) deployment(t *table, line int) {
	name, _, _ := l.text(t, "model_name")
	params, _, _ := l.sub(t, "litellm_params")
	model, at, ok := l.text(params, "model")
	if !ok {
		l.problem(l.file, line, "model_list.litellm_params.model", "is required")
		return
	}
	if name == "" {
		name = model
	}
	provider, served, prefixed := strings.Cut(model, "/")
	if own, _, ok := l.text(params, "custom_llm_provider"); ok {
		provider, served = own, strings.TrimPrefix(model, own+"/")
	} else if !prefixed {
		provider, served = "openai", model
	}
	weight := l.weight(params)
	base, where, hosted := l.text(params, "api_base")
	switch {
	case !slices.Contains(localProviders, provider):
		l.lose(l.doc, l.file, line, "model_list "+name, "the proxy calls engines and endpoints with the OpenAI API, not provider %s: it does not call this deployment", provider)
		return
	case !hosted && strings.Contains(served, "*"):
		l.lose(l.doc, l.file, line, "model_list "+name, "a [[remote]] has one model, not a pattern of models: requests for other models get 404")
		return
	case !hosted && (provider == "openai" || provider == "text-completion-openai"):
		l.remote(params, name, served, line)
		return
	case !hosted:
		l.problem(l.file, at.line, "model_list.litellm_params.api_base", "is required for provider %s", provider)
		return
	}
	address, ok := l.address(base, where)
	if !ok {
		return
	}
	l.group(name, line).serve(served, weight)
	l.engine(params, address, served)
	l.params(params, name)
	l.left(t, "is information for LiteLLM's clients and its cost accounts: the proxy has no place for it")
}

// weight returns the share of a deployment in its group: simple-shuffle reads weight, rpm or tpm
// (litellm/router_strategy/simple_shuffle.py).
func (l *liteLLM) weight(params *table) float64 {
	for _, key := range []string{"weight", "rpm", "tpm"} {
		if e, found := params.find(key); found {
			if x, err := strconv.ParseFloat(resolve(e.value).Value, 64); err == nil && x > 0 && x <= 1e12 {
				if key == "weight" {
					params.take(key)
				}
				return x
			}
		}
	}
	return 1
}

// engine adds an address, or a model of an address that the file has named before.
func (l *liteLLM) engine(params *table, address, served string) {
	e := l.engines[address]
	if e == nil {
		e = &liteEngine{most: l.most}
		l.engines[address] = e
		l.addresses = append(l.addresses, address)
	}
	if !slices.Contains(e.served, served) {
		e.served = append(e.served, served)
	}
	if n, _, ok := l.integer(params, "max_parallel_requests", 1, 1<<30); ok {
		e.most = n
	}
	if key, found := params.take("api_key"); found && !slices.Contains([]string{"", "none", "empty", "fake", "dummy"}, strings.ToLower(resolve(key.value).Value)) {
		e.key = true
		l.warn(l.file, key.line, "model_list.litellm_params.api_key", "pdproxy import writes no keys: put the key into a file and name the file in engine.api_key_file")
	}
}

// writeEngines writes the engines.
func (l *liteLLM) writeEngines() {
	for i, address := range l.addresses {
		from := l.engines[address]
		e := l.doc.engine()
		e.set("name", text("e"+strconv.Itoa(i)), "")
		e.set("url", text(address), "api_base")
		e.set("role", text(config.RoleBoth), "")
		e.set("connector", text(config.ConnectorNone), "")
		// An engine with several models, such as adapters, names them itself.
		if len(from.served) == 1 && from.served[0] != "*" {
			e.set("model", text(from.served[0]), "litellm_params.model")
		}
		if from.most > 0 {
			e.set("max_conns", number(from.most), "max_parallel_requests")
		}
		if from.key {
			e.sampleKey("api_key_file", text("engine.key"), "api_key: put the key into a file of one line and write the path of the file")
		}
	}
}

// remote adds an endpoint of OpenAI to a group.
func (l *liteLLM) remote(params *table, name, served string, line int) {
	g := l.group(name, line)
	remote := objectName(name)
	if len(g.remotes) > 0 {
		remote += "-" + strconv.Itoa(len(g.remotes))
	}
	g.remotes = append(g.remotes, config.RemotePrefix+remote)
	r := l.doc.add("remote")
	r.set("name", text(remote), "")
	r.set("url", text("https://api.openai.com"), "provider openai without api_base")
	r.set("model", text(served), "litellm_params.model")
	r.sampleKey("api_key_file", text("openai.key"), "api_key: put the key into a file of one line and write the path of the file")
	if e, found := params.take("api_key"); found {
		l.warn(l.file, e.line, "model_list.litellm_params.api_key", "pdproxy import writes no keys: put the key into a file and name the file in remote.api_key_file")
	}
	l.params(params, name)
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
		place, why = "round_robin", "requests spread just as evenly"
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

// empty reports whether a list or mapping has no entries.
func empty(node *yaml.Node) bool { return len(resolve(node).Content) == 0 }
