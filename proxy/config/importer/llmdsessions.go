package importer

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// The strategies of scorer/sessionaffinity and filter/sessionaffinity. Release 0.9 had the parameters
// headerName and algorithm instead.
const (
	encodedEndpoint = "encoded_endpoint_header"
	sessionID       = "session_id"
)

func sessionScorer(p *picker, g *pickerPlugin) []scorer {
	p.session(g)
	return []scorer{{name: "session"}}
}

func sessionFilter(p *picker, g *pickerPlugin) []scorer {
	p.session(g)
	return []scorer{{name: "session_filter", filter: true}}
}

// session reads where a plugin gets the id of a session.
func (p *picker) session(g *pickerPlugin) {
	strategy, at, _ := p.text(g.parameters, "strategy")
	encoded, _, _ := p.sub(g.parameters, "encodedEndpointHeaderConfig")
	byID, _, _ := p.sub(g.parameters, "sessionIdConfig")
	header, _, _ := p.text(encoded, "header")
	if old, _, ok := p.text(g.parameters, "headerName"); ok {
		header = old
	}
	algorithm, _, _ := p.text(g.parameters, "algorithm")
	switch {
	case strategy == sessionID:
		p.sessionSources(g, byID)
	case strategy != "" && strategy != encodedEndpoint:
		p.problem(p.file, at.line, "plugins.parameters.strategy", "want %s or %s", encodedEndpoint, sessionID)
	default:
		if header == "" {
			header = "x-session-token"
		}
		p.sessions = append(p.sessions, header)
		if algorithm != "session_id_header" {
			p.unequal(g.line, g.key(""), "the proxy writes no session header into its answers: clients must send an id of their own in %s", text(header))
		}
	}
	for _, e := range slices.Concat(encoded.entries, byID.entries) {
		p.unequal(e.line, g.key(e.key), "has no equal: [conversation] capacity bounds the sessions, not a time")
	}
}

// sessionSources reads the places of the id in their order (scheduling/util/sessionaffinity).
func (p *picker) sessionSources(g *pickerPlugin, t *table) {
	sources, _, _ := p.list(t, "sources")
	if len(sources) == 0 {
		p.sessions = append(p.sessions, "x-session-id")
	}
	for _, node := range sources {
		one := p.table("plugins.parameters.sessionIdConfig.sources", node)
		header, _, _ := p.text(one, "header")
		attribute, _, _ := p.text(one, "attribute")
		producer, _, _ := p.text(one, "producer")
		p.leftKeys(one)
		switch {
		case (header == "") == (attribute == ""):
			p.problem(p.file, node.Line, one.path, "want header or attribute")
		case header != "":
			p.sessions = append(p.sessions, header)
		default:
			p.sessionAttribute(g, node, attribute, producer)
		}
	}
}

// sessionAttribute reads the headers from which another plugin makes the id.
func (p *picker) sessionAttribute(g *pickerPlugin, node *yaml.Node, attribute, producer string) {
	from := p.firstOf("session-id-producer")
	if attribute == "agent-identity" {
		from = p.firstOf("agent-identity")
	} else if named, found := p.plugins[producer]; found && named.kind == "session-id-producer" {
		from = named
	}
	if from == nil {
		p.unequal(node.Line, g.key("sessionIdConfig.sources"), "no plugin of the file makes the attribute %s", text(attribute))
		return
	}
	p.sessions = append(p.sessions, p.words(from.parameters, "additionalSessionHeaders")...)
	if header, _, ok := p.text(from.parameters, "headerName"); ok {
		p.sessions = append(p.sessions, header)
	}
	if _, e, ok := p.text(from.parameters, "cookieName"); ok {
		p.unequal(e.line, from.key(e.key), "the id of a conversation is in a header or in a member of the body, not in a cookie")
	}
}

// conversations writes the headers with the id of a session before those that the proxy knows, such
// as those of agent-identity.
func (p *picker) conversations() {
	const most = 64
	if len(p.sessions) > most {
		p.problem(p.file, 0, "plugins", "the session affinity has %d headers: at most %d are read", len(p.sessions), most)
		return
	}
	var headers []string
	for _, name := range slices.Concat(p.sessions, config.Default().Conversation.Headers) {
		name = strings.TrimSpace(name)
		if name != "" && !slices.ContainsFunc(headers, func(other string) bool { return strings.EqualFold(name, other) }) {
			headers = append(headers, name)
		}
	}
	if len(p.sessions) > 0 {
		p.doc.set("conversation", "headers", list(headers), "headers of the session affinity")
	}
}
