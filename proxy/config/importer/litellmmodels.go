package importer

import (
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// liteGroup is a model_name: the name in the requests of clients. Several deployments may share
// it.
type liteGroup struct {
	name string
	line int
	// served are the engines' names of the models, with the weights of their deployments.
	served  []string
	weights map[string]float64
	// remotes are names of [[remote]], with their prefix.
	remotes []string
	// fallbacks are the model_names that take over, in their order.
	fallbacks []string
}

// group returns the group of a model_name.
func (l *liteLLM) group(name string, line int) *liteGroup {
	g := l.groups[name]
	if g == nil {
		g = &liteGroup{name: name, line: line, weights: map[string]float64{}}
		l.groups[name] = g
		l.names = append(l.names, name)
	}
	return g
}

// serve adds a deployment.
func (g *liteGroup) serve(model string, weight float64) {
	if !slices.Contains(g.served, model) {
		g.served = append(g.served, model)
	}
	g.weights[model] += weight
}

// plain reports whether the engines know the name themselves, so that it needs no [[model]].
func (g *liteGroup) plain() bool {
	return len(g.served) == 1 && (g.served[0] == g.name || g.served[0] == "*" && g.name == "*")
}

// models writes the names of clients as [[model]], with aliases and fallbacks.
func (l *liteLLM) models(router, settings *table) {
	for _, t := range []*table{router, settings} {
		l.fallbacks(t)
	}
	for _, name := range l.names {
		g := l.groups[name]
		switch {
		case strings.Contains(name, "*") && !g.plain():
			l.lose(l.doc, l.file, g.line, "model_list "+name, "the proxy has no patterns of names: clients must request the name of a model as the engine serves it")
		case slices.ContainsFunc(g.served, func(model string) bool { other := l.groups[model]; return other != nil && other != g && !other.plain() }):
			l.problem(l.file, g.line, "model_list.model_name", "an engine serves a model with the name of another model_name: give that model_name another name")
		case !g.plain() || len(g.fallbacks) > 0 || len(g.remotes) > 0:
			l.model(g)
		}
	}
	for _, t := range []*table{router, settings} {
		l.aliases(t)
	}
}

// model writes one [[model]].
func (l *liteLLM) model(g *liteGroup) {
	var fallback []string
	for _, name := range slices.Concat(g.remotes, l.targets(g)) {
		if name != g.name && !slices.Contains(fallback, name) {
			fallback = append(fallback, name)
		}
	}
	if len(g.served) > 0 && len(g.remotes) > 0 {
		l.doc.note(g.line, "model_list "+g.name, "LiteLLM shares the requests between the engines and the endpoint; in pdproxy the endpoint gets those that no engine can take")
	}
	m := l.doc.add("model")
	m.set("name", text(g.name), "model_name, which clients request")
	switch {
	case len(g.served) == 1 && !g.plain():
		m.set("alias_of", text(g.served[0]), "litellm_params.model")
	case len(g.served) > 1:
		m.set("split", l.split(g), "the deployments of this model_name and their weights")
	}
	if len(fallback) > 0 {
		m.set("fallback", list(fallback), "fallbacks, and endpoints of OpenAI")
	}
}

// split returns the shares of the models of a group.
func (l *liteLLM) split(g *liteGroup) value {
	var shares []string
	for _, model := range g.served {
		shares = append(shares, string(text(model))+" = "+strconv.FormatFloat(g.weights[model], 'f', -1, 64))
	}
	return value("{ " + strings.Join(shares, ", ") + " }")
}

// targets returns the models and remotes of the fallbacks of a group. The fallback of a fallback
// does not count, in both proxies; [[model]] with a split is no fallback, but its models are.
func (l *liteLLM) targets(g *liteGroup) []string {
	var targets []string
	for _, name := range g.fallbacks {
		other := l.groups[name]
		switch {
		case other == nil: // lost: its message is at the fallback
		case len(other.served) == 1:
			targets = append(targets, append([]string{other.name}, other.remotes...)...)
		default:
			targets = append(targets, append(slices.Clone(other.served), other.remotes...)...)
		}
	}
	return targets
}

// fallbacks reads the fallbacks of one section.
func (l *liteLLM) fallbacks(t *table) {
	nodes, at, _ := l.list(t, "fallbacks")
	for _, node := range nodes {
		one := l.table(t.name("fallbacks"), node)
		for _, e := range one.entries {
			l.fallback(at, e.key, resolve(e.value).Content, e.line)
		}
	}
	nodes, at, _ = l.list(t, "default_fallbacks")
	if len(nodes) > 0 {
		for _, name := range l.names {
			l.fallback(at, name, nodes, at.line)
		}
	}
	for _, other := range []struct{ key, when string }{
		{"context_window_fallbacks", "a prompt too long for its model"}, {"content_policy_fallbacks", "a refusal by a provider"},
	} {
		if e, found := t.take(other.key); found && !empty(e.value) {
			l.lose(l.doc, l.file, e.line, t.name(other.key), "fallback is for requests that no engine can take, not for %s: such a request gets the engine's error", other.when)
		}
	}
}

// fallback adds the fallbacks of one model_name.
func (l *liteLLM) fallback(at tableEntry, name string, nodes []*yaml.Node, line int) {
	g := l.groups[name]
	if g == nil {
		if name != "*" {
			l.lose(l.doc, l.file, line, at.key+" "+name, "the result has no model of this name")
			return
		}
		for _, each := range l.names {
			l.fallback(at, each, nodes, line)
		}
		return
	}
	for _, node := range nodes {
		n := resolve(node)
		switch {
		case n.Kind != yaml.ScalarNode:
			l.lose(l.doc, l.file, node.Line, at.key+" "+name, "a fallback with parameters of its own has no equivalent")
		case l.groups[n.Value] == nil:
			l.lose(l.doc, l.file, node.Line, at.key+" "+name, "%s is not in the result: %s has no such fallback", text(n.Value), text(name))
		default:
			g.fallbacks = append(g.fallbacks, n.Value)
		}
	}
}

// aliases reads model_group_alias: ALIAS: NAME, or ALIAS: {model: NAME, hidden: true}.
func (l *liteLLM) aliases(t *table) {
	aliases, _, _ := l.sub(t, "model_group_alias")
	for _, e := range aliases.entries {
		name := resolve(e.value).Value
		if resolve(e.value).Kind == yaml.MappingNode {
			with := l.table(aliases.name(e.key), e.value)
			name, _, _ = l.text(with, "model")
			for _, left := range with.entries {
				l.doc.note(left.line, with.name(left.key), "GET /v1/models of pdproxy lists each [[model]]")
			}
		}
		switch {
		case l.groups[name] == nil:
			l.lose(l.doc, l.file, e.line, aliases.name(e.key), "%s is not in the result: requests for %s get 404", text(name), text(e.key))
		case l.groups[e.key] != nil:
			l.problem(l.file, e.line, aliases.name(e.key), "is also a model_name of the file")
		default:
			m := l.doc.add("model")
			m.set("name", text(e.key), "model_group_alias")
			m.set("alias_of", text(name), "")
		}
	}
}
