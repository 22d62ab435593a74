package config

import (
	"slices"
	"strings"
)

// Conversation configures how requests of one conversation are recognized, so that a
// later turn can go to the engines of the earlier ones. Without an id, a conversation
// is recognized by its prompts.
type Conversation struct {
	// Fields are the body members that may contain the client's id of the conversation,
	// read in this order; dots lead into objects. Default: those of TensorRT-LLM,
	// SGLang and vLLM.
	Fields []string `toml:"fields"`
	// Headers are the request headers that may contain it, read after Fields. Default: the
	// session headers of Dynamo, SGLang's gateway, Claude Code, Codex, OpenCode and
	// TensorRT-LLM, which config.toml lists.
	Headers []string `toml:"headers"`
	// ParentHeaders are the request headers that may contain the id of the parent
	// conversation, read in this order. The first turn of a conversation with an id starts
	// at the home of its parent. Default: the parent headers of Dynamo, Claude Code, Codex
	// and OpenCode, which config.toml lists. Empty: conversations have no parents.
	ParentHeaders []string `toml:"parent_headers"`
	// LateFields are body members that are read after Headers, because clients may use
	// one value for many conversations. Default: prompt_cache_key and
	// client_metadata.session_id.
	LateFields []string `toml:"late_fields"`
	// Capacity is the number of stored conversations; the least recently used one is dropped.
	// Default 100000; at least 1.
	Capacity int `toml:"capacity"`
}

// sessionHeaders returns the headers in which clients name a session. X-Correlation-ID is
// not among them: many clients and gateways send a new one with each request.
func sessionHeaders() []string {
	return []string{
		// Dynamo's own header has priority over those of agents there, too
		// (lib/llm/src/protocols/agents.rs, session_affinity_header_value).
		"X-Dynamo-Session-ID",
		"X-SMG-Routing-Key", // SGLang: sgl-model-gateway/src/policies/manual.rs
		// Claude Code (code.claude.com/docs/en/llm-gateway-protocol, "Request headers"). A
		// subagent has a prompt of its own, so its id comes first, as in Dynamo.
		"X-Claude-Code-Agent-Id", "X-Claude-Code-Session-Id",
		// Codex: codex-rs/codex-api/src/requests/headers.rs, build_session_headers; a thread is
		// one conversation of a session. Releases before had session_id,
		// build_conversation_headers.
		"thread-id", "session-id", "session_id",
		// OpenCode: packages/opencode/src/session/llm/request.ts. TensorRT-LLM reads the first
		// two, too, and x-multi-turn-session-id (serve/conversation_id.py).
		"X-Session-ID", "x-session-affinity", "x-opencode-session",
		"x-multi-turn-session-id",
	}
}

// parentHeaders returns the headers in which clients name the session that started a
// session.
func parentHeaders() []string {
	return []string{
		// Dynamo: lib/llm/src/protocols/agents.rs, agent_context_header_values. The file has
		// the names of the other agents, too, in this order.
		"X-Dynamo-Parent-Session-ID",
		// Claude Code: a subagent that another subagent started names that subagent. All
		// other subagents belong to the session itself, whose id is the root's own id.
		"X-Claude-Code-Parent-Agent-Id", "X-Claude-Code-Session-Id",
		// Codex: codex-rs/core/src/responses_metadata.rs, compatibility_headers.
		"x-codex-parent-thread-id",
		"x-parent-session-id", // OpenCode: packages/opencode/src/session/llm/request.ts
	}
}

func defaultConversation() Conversation {
	return Conversation{
		Fields:        []string{"conversation_params.conversation_id", "conversation_id", "session_id"},
		Headers:       sessionHeaders(),
		ParentHeaders: parentHeaders(),
		LateFields:    []string{"prompt_cache_key", "client_metadata.session_id"},
		Capacity:      100_000,
	}
}

// maxConversations bounds the table to about 2.7 GB.
const maxConversations = 10_000_000

// conversation checks [conversation].
func (k *checker) conversation() {
	c := k.config.Conversation
	for _, list := range []struct {
		key   string
		paths []string
	}{{"conversation.fields", c.Fields}, {"conversation.late_fields", c.LateFields}} {
		for i, path := range list.paths {
			if slices.Contains(strings.Split(path, "."), "") {
				k.add(indexKey(list.key, i), "invalid path %q: want the name of a body member, or names with dots between them", path)
			}
		}
	}
	for _, list := range []struct {
		key   string
		names []string
	}{{"conversation.headers", c.Headers}, {"conversation.parent_headers", c.ParentHeaders}} {
		for i, name := range list.names {
			if !isHeaderName(name) {
				k.add(indexKey(list.key, i), "must be the name of a header, found %q", name)
			}
		}
	}
	k.within("conversation.capacity", c.Capacity, 1, maxConversations)
}
