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
	// Headers are the request headers that may contain it, read after Fields. Default:
	// those of TensorRT-LLM and vLLM.
	Headers []string `toml:"headers"`
	// LateFields are body members that are read after Headers, because clients may use
	// one value for many conversations. Default: prompt_cache_key and
	// client_metadata.session_id.
	LateFields []string `toml:"late_fields"`
	// Capacity is the number of conversations that are remembered; the least recently
	// used one is dropped. Default 100000; at least 1.
	Capacity int `toml:"capacity"`
}

func defaultConversation() Conversation {
	return Conversation{
		Fields:     []string{"conversation_params.conversation_id", "conversation_id", "session_id"},
		Headers:    []string{"X-Session-ID", "X-Correlation-ID", "x-session-affinity", "x-multi-turn-session-id"},
		LateFields: []string{"prompt_cache_key", "client_metadata.session_id"},
		Capacity:   100_000,
	}
}

// mostConversations bounds the table to about 2.7 GB.
const mostConversations = 10_000_000

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
	for i, name := range c.Headers {
		if !isHeaderName(name) {
			k.add(indexKey("conversation.headers", i), "must be the name of a header, found %q", name)
		}
	}
	k.within("conversation.capacity", c.Capacity, 1, mostConversations)
}
