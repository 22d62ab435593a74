package config

// The sources of prompts' token ids.
const (
	TokensClient = "client" // the request carries them
	TokensEngine = "engine" // an engine's tokenize endpoint
	TokensLocal  = "local"  // a tokenizer file of this host
)

func tokenSources() []string { return []string{TokensClient, TokensEngine, TokensLocal} }

// KVIndex configures the index of the KV blocks that engines hold. It is used when a
// policy needs blocks.
type KVIndex struct {
	// MaxEntries bounds the (block, target) pairs in the index; a pair takes at most 40
	// bytes. Default 16777216.
	MaxEntries int `toml:"max_entries"`
	// TextTokens is the number of tokens that a rank of an engine without KV events is
	// assumed to keep. Default 1000000; 0: no bound.
	TextTokens int `toml:"text_tokens"`
}

// Tokens configures how prompts are converted to token ids, by which they are looked up
// among the blocks of engines with KV events.
type Tokens struct {
	// Sources are tried in this order: "client", "engine", "local". Default
	// ["client", "local", "engine"].
	Sources []string `toml:"sources"`
	// Files are the tokenizer.json of models, by the model's name; that of ""
	// serves every other. They encode plain prompts; chats need an engine.
	// Default {}.
	Files map[string]string `toml:"files"`
	// Timeout is how long one request may wait for its ids; after that it is placed
	// without them. Default 250ms; never 0.
	Timeout Duration `toml:"timeout"`
}

// Recording configures the trace that a node writes for the replay lab: lengths, hashes
// of blocks and times, never text.
type Recording struct {
	// Path is the file. A new one is begun at each start and takeover, and with each
	// new coordinator. An existing file that is not empty is renamed to PATH.TIME, with
	// the time of its last change. Default "": no recording.
	Path string `toml:"path"`
	// BlockTokens is how many tokens a block of the recording has. Default 512.
	BlockTokens int `toml:"block_tokens"`
}

func defaultKVIndex() KVIndex {
	return KVIndex{MaxEntries: 16 << 20, TextTokens: 1_000_000}
}

func defaultTokens() Tokens {
	return Tokens{
		Sources: []string{TokensClient, TokensLocal, TokensEngine}, Files: map[string]string{},
		Timeout: seconds(1) / 4,
	}
}

func defaultRecording() Recording { return Recording{BlockTokens: 512} }

// kv checks [kv_index], [tokens] and [recording].
func (k *checker) kv() {
	x := k.config.KVIndex
	k.atLeast("kv_index.max_entries", x.MaxEntries, 1)
	k.atLeast("kv_index.text_tokens", x.TextTokens, 0)

	t := k.config.Tokens
	for i, s := range t.Sources {
		k.oneOf(indexKey("tokens.sources", i), s, tokenSources()...)
	}
	k.positive("tokens.timeout", int64(t.Timeout))
	k.within("recording.block_tokens", k.config.Recording.BlockTokens, 1, 1<<20)
}
