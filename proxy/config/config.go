// Package config parses the text of a config.toml into a validated struct. It opens
// nothing: no file that a key names, no socket, no engine. Callers pass bytes and get
// either a valid Config or the list of all problems, each with its key and line.
//
// The steps are always the same: defaults, then a strict decode (an unknown key or a
// wrong type is a problem), then the checks of validate*.go. The sections are
// documented at their structs: server.go for the public side, routing.go for policies
// and plugins, kv.go for KV blocks, conversation.go for conversations, engines.go for
// engines and the calls to them, fleet.go for discovery and for several processes. The
// config.toml at the root of the repository shows every key with its default.
//
// The decisions behind this package are in docs/design/request.md.
package config

import (
	"errors"
	"strings"

	"github.com/BurntSushi/toml"
)

// Config is one whole configuration. A value from Parse is complete and valid. It must
// not be changed, and is safe for concurrent readers.
type Config struct {
	// Server is the public side: addresses, TLS, client keys, sizes.
	Server Server `toml:"server"`
	// Admin is the operators' side: metrics, explain, reload.
	Admin Admin `toml:"admin"`
	// Metrics is an address for Prometheus alone.
	Metrics Metrics `toml:"metrics"`
	// EPP is the endpoint picker for gateways.
	EPP EPP `toml:"epp"`
	// Timeouts bounds each wait of an exchange.
	Timeouts Timeouts `toml:"timeouts"`
	// Limits bounds how many exchanges run and wait.
	Limits Limits `toml:"limits"`
	// Policy names the policies that decide.
	Policy Policy `toml:"policy"`
	// Scores are the sets of scorers for Policy.Place "scores", in the order of the file.
	Scores []ScoreSet `toml:"scores"`
	// Conversation configures how requests of one conversation are recognized.
	Conversation Conversation `toml:"conversation"`
	// KVIndex configures the index of the engines' KV blocks.
	KVIndex KVIndex `toml:"kv_index"`
	// Tokens configures how prompts are converted to token ids.
	Tokens Tokens `toml:"tokens"`
	// Recording is the trace that is written for the replay lab.
	Recording Recording `toml:"recording"`
	// Plugins are the loaded Wasm modules, filters in the order of the file.
	Plugins []Plugin `toml:"plugin"`
	// Upstreams are the addresses that plugins may call.
	Upstreams []Upstream `toml:"upstream"`
	// Models are names of models in requests, beside the names that engines report.
	Models []Model `toml:"model"`
	// Remotes are endpoints of other operators, for fallbacks of Models.
	Remotes []Remote `toml:"remote"`
	// PriorityClasses are the classes of requests that share the proxy's places.
	PriorityClasses []PriorityClass `toml:"priority_class"`
	// Tenants are groups of clients with common limits.
	Tenants []Tenant `toml:"tenant"`
	// JWTs are the issuers of tokens that clients may send instead of an API key.
	JWTs []JWT `toml:"jwt"`
	// Engines are the configured instances.
	Engines []Engine `toml:"engine"`
	// Health configures the probes of instances.
	Health Health `toml:"health"`
	// Sleep configures the sleep mode of vLLM engines.
	Sleep Sleep `toml:"sleep"`
	// Retry bounds the retries of legs.
	Retry Retry `toml:"retry"`
	// Circuit configures when a failing instance or pair is not used.
	Circuit Circuit `toml:"circuit"`
	// Pairs configures the pairing of prefill and decode engines.
	Pairs Pairs `toml:"pairs"`
	// TRTLLM configures the calls to TensorRT-LLM's workers.
	TRTLLM TRTLLM `toml:"trtllm"`
	// Discovery configures the search for further instances.
	Discovery Discovery `toml:"discovery"`
	// Fleet is one coordinator with many workers.
	Fleet Fleet `toml:"fleet"`
	// Sidecar configures pdproxy beside one engine.
	Sidecar Sidecar `toml:"sidecar"`
	// Transport configures the HTTP calls to engines.
	Transport Transport `toml:"transport"`

	// lines maps each key to its line in the parsed text; nil in a Config that was not
	// parsed.
	lines lineIndex
	// file is the name of the parsed file; "" if the text was not from a file.
	file string
}

// Default returns the configuration of an empty file: every key at its
// default, no engine, no plugin.
func Default() Config {
	return Config{
		Server:       defaultServer(),
		Admin:        defaultAdmin(),
		Metrics:      Metrics{Names: []string{}},
		EPP:          EPP{PassThrough: true, DrainQuiet: seconds(5)},
		Timeouts:     defaultTimeouts(),
		Limits:       defaultLimits(),
		Policy:       defaultPolicy(),
		KVIndex:      defaultKVIndex(),
		Tokens:       defaultTokens(),
		Recording:    defaultRecording(),
		Conversation: defaultConversation(),
		Health:       defaultHealth(),
		Sleep:        defaultSleep(),
		Retry:        defaultRetry(),
		TRTLLM:       defaultTRTLLM(),
		Circuit:      defaultCircuit(),
		Pairs:        defaultPairs(),
		Discovery:    defaultDiscovery(),
		Fleet:        defaultFleet(),
		Sidecar:      defaultSidecar(),
		Transport:    defaultTransport(),
	}
}

// Parse decodes and validates data, the text of a config.toml. The error is of type
// Problems and contains all problems. If the text is not TOML, the error contains only
// the problem at which the parser stopped.
func Parse(data []byte) (Config, error) { return ParseFile("", data) }

// ParseFile is Parse for the content of a file. Problems and warnings name the file.
func ParseFile(file string, data []byte) (Config, error) {
	cfg, problems := Draft(file, data)
	if len(problems) > 0 {
		return Config{}, problems
	}
	return *cfg, nil
}

// Draft is ParseFile for checks that also find problems of other kinds: it returns the decoded part
// of the file, together with the problems. Only a configuration without problems may be served. The
// result is nil for a text that is not TOML.
func Draft(file string, data []byte) (*Config, Problems) {
	tree, p := decodeTOML(string(data))
	if p != nil {
		p.File = file
		return nil, Problems{*p}
	}
	cfg := Default()
	cfg.file = file
	cfg.lines = scanLines(string(data))

	problems := decodeTree(tree, &cfg)
	limits, _ := tree["limits"].(map[string]any)
	_, set := limits["per_client"]
	cfg.Limits.defaultClient(set)
	reported := problems.keys()
	for _, p := range cfg.Validate() {
		// A key that could not be decoded still has its default: a problem with that
		// default would be misleading.
		if !reported[p.Key] {
			problems = append(problems, p)
		}
	}
	problems = cfg.complete(problems)
	problems.Sort()
	return &cfg, problems
}

// decodeTOML returns the tree of a text that has the shape of a configuration.
func decodeTOML(text string) (tree map[string]any, p *Problem) {
	if p := checkShape(text); p != nil {
		return nil, p
	}
	if _, err := toml.Decode(text, &tree); err != nil {
		p := syntaxProblem(text, err)
		return nil, &p
	}
	return tree, nil
}

// syntaxProblem converts the parse error of text to a Problem. Its line is the start of
// the offending token: the parser's own line is one too high if it stopped at a line
// end.
func syntaxProblem(text string, err error) Problem {
	var parse toml.ParseError
	if !errors.As(err, &parse) {
		return Problem{Message: shortened(err.Error())}
	}
	start := min(max(parse.Position.Start, 0), len(text))
	return Problem{
		Key:     shortened(parse.LastKey),
		Line:    1 + strings.Count(text[:start], "\n"),
		Message: "invalid TOML: " + strings.TrimSuffix(strings.ReplaceAll(shortened(parse.Message), "\n", `\n`), ".") + syntaxHint(text, parse.Message, start),
	}
}
