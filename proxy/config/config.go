// Package config turns the text of a config.toml into a checked struct. It
// opens nothing: no file that a key names, no socket, no engine; callers hand
// it bytes and get either a Config that may be used as it is or the list of
// everything that is wrong with it, each entry with its key and line.
//
// The way is always the same: defaults, then a strict decode (an unknown key
// or a wrong type is a problem), then the checks of validate*.go. The sections
// are described where their structs are: server.go for the front door,
// routing.go for policies and plugins, kv.go for what is known of KV blocks, conversation.go for conversations,
// engines.go for engines and how they are called and found, fleet.go for more
// than one process. The config.toml at the root of the repository shows every
// key with its default.
package config

import (
	"errors"
	"strings"

	"github.com/BurntSushi/toml"
)

// Config is one whole configuration. A value from Parse is complete and
// checked; it is read-only by convention and safe for concurrent readers.
type Config struct {
	// Server is the public side: addresses, TLS, client keys, sizes.
	Server Server `toml:"server"`
	// Admin is the operators' side: metrics, explain, reload.
	Admin Admin `toml:"admin"`
	// Timeouts bounds each wait of an exchange.
	Timeouts Timeouts `toml:"timeouts"`
	// Limits bounds how many exchanges run and wait.
	Limits Limits `toml:"limits"`
	// Policy names the policies that decide.
	Policy Policy `toml:"policy"`
	// Conversation is how requests are known to belong together.
	Conversation Conversation `toml:"conversation"`
	// KVIndex is what is remembered of the engines' KV blocks.
	KVIndex KVIndex `toml:"kv_index"`
	// Tokens is how prompts become token ids.
	Tokens Tokens `toml:"tokens"`
	// Recording is the trace that is written for the replay lab.
	Recording Recording `toml:"recording"`
	// Plugins are the loaded Wasm modules, filters in the order of the file.
	Plugins []Plugin `toml:"plugin"`
	// Upstreams are the addresses that plugins may call.
	Upstreams []Upstream `toml:"upstream"`
	// Engines are the instances known from the start.
	Engines []Engine `toml:"engine"`
	// Health is how instances are probed.
	Health Health `toml:"health"`
	// Retry is how often a leg is tried again.
	Retry Retry `toml:"retry"`
	// Circuit is when a failing instance or pair is left alone.
	Circuit Circuit `toml:"circuit"`
	// Pairs is how prefill and decode engines come together.
	Pairs Pairs `toml:"pairs"`
	// TRTLLM is how the workers of TensorRT-LLM are spoken to.
	TRTLLM TRTLLM `toml:"trtllm"`
	// Discovery is where further instances are found.
	Discovery Discovery `toml:"discovery"`
	// Fleet is one coordinator with many workers.
	Fleet Fleet `toml:"fleet"`
	// Sidecar is pdproxy beside one engine.
	Sidecar Sidecar `toml:"sidecar"`
	// Transport is how engines are called.
	Transport Transport `toml:"transport"`

	// lines knows on which line of the parsed text each key stands; nil in a
	// Config that was not parsed.
	lines lineIndex
}

// Default returns the configuration of an empty file: every key at its
// default, no engine, no plugin.
func Default() Config {
	return Config{
		Server:       defaultServer(),
		Admin:        defaultAdmin(),
		Timeouts:     defaultTimeouts(),
		Limits:       defaultLimits(),
		Policy:       defaultPolicy(),
		KVIndex:      defaultKVIndex(),
		Tokens:       defaultTokens(),
		Recording:    defaultRecording(),
		Conversation: defaultConversation(),
		Health:       defaultHealth(),
		Retry:        defaultRetry(),
		Circuit:      defaultCircuit(),
		Pairs:        defaultPairs(),
		Discovery:    defaultDiscovery(),
		Fleet:        defaultFleet(),
		Sidecar:      defaultSidecar(),
		Transport:    defaultTransport(),
	}
}

// Parse decodes and checks data, the text of a config.toml. The error, when
// there is one, is of type Problems and holds everything that is wrong; a
// text that is no TOML at all yields the one problem at which reading stopped.
func Parse(data []byte) (Config, error) {
	var tree map[string]any
	if _, err := toml.Decode(string(data), &tree); err != nil {
		return Config{}, Problems{syntaxProblem(string(data), err)}
	}
	cfg := Default()
	cfg.lines = scanLines(string(data))

	problems := decodeTree(tree, &cfg)
	limits, _ := tree["limits"].(map[string]any)
	_, set := limits["per_client"]
	cfg.Limits.defaultClient(set)
	reported := problems.keys()
	for _, p := range cfg.Validate() {
		// A key that could not be decoded still has its default: what the
		// checks say about that default would only mislead.
		if !reported[p.Key] {
			problems = append(problems, p)
		}
	}
	if len(problems) > 0 {
		sortProblems(problems)
		return Config{}, problems
	}
	return cfg, nil
}

// syntaxProblem turns the parse error of text into a Problem. Its line is that
// where the offending token starts: the parser's own count is one too high
// where it stopped at a line end.
func syntaxProblem(text string, err error) Problem {
	var parse toml.ParseError
	if !errors.As(err, &parse) {
		return Problem{Message: err.Error()}
	}
	start := min(max(parse.Position.Start, 0), len(text))
	return Problem{
		Key:     parse.LastKey,
		Line:    1 + strings.Count(text[:start], "\n"),
		Message: "invalid TOML: " + strings.ReplaceAll(parse.Message, "\n", `\n`),
	}
}
