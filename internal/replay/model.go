package replay

import (
	"embed"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
)

// Model holds the times of engines and the size of a decode instance. Each file
// in models/ is one Model.
type Model struct {
	Name string `toml:"name"`
	// Prefill of one token at position p of its prompt takes
	// PrefillMicros + PrefillAttentionMicros*p µs on one rank, and each request
	// PrefillRequestMicros once.
	PrefillMicros          float64 `toml:"prefill_us_per_token"`
	PrefillAttentionMicros float64 `toml:"prefill_attention_us_per_token_and_position"`
	PrefillRequestMicros   float64 `toml:"prefill_us_per_request"`
	ChunkTokens            int     `toml:"prefill_chunk_tokens"` // the most that a rank computes in one step

	// A decode step takes DecodeMicros, DecodeRequestMicros for each request of
	// the batch, and DecodeTokenMicros for each token of theirs in the cache.
	DecodeMicros        float64 `toml:"decode_us_per_step"`
	DecodeRequestMicros float64 `toml:"decode_us_per_request"`
	DecodeTokenMicros   float64 `toml:"decode_us_per_kv_token"`
	DecodeRequests      int     `toml:"decode_max_requests"` // the largest batch
	DecodeTokens        int     `toml:"decode_kv_tokens"`    // KV memory of one decode instance

	// A transfer takes TransferMicros, and TransferTokenMicros for each token that the
	// receiver does not hold, which has KVBytes of KV.
	TransferMicros      float64 `toml:"transfer_us_per_request"`
	TransferTokenMicros float64 `toml:"transfer_us_per_token"`
	KVBytes             float64 `toml:"kv_bytes_per_token"`

	// The limits of a good request, in ms: the time to its first token, and the
	// mean time between its tokens.
	TTFTMillis float64 `toml:"slo_ttft_ms"`
	ITLMillis  float64 `toml:"slo_itl_ms"`
}

//go:embed models/*.toml
var models embed.FS

// Presets are the names of the built-in models; the first is the default.
func Presets() []string { return []string{"llama70b-h100", "llama70b-a100", "deepseek-v3-h200"} }

// Preset returns the built-in model of that name.
func Preset(name string) (*Model, error) {
	f, err := models.Open("models/" + name + ".toml")
	if err != nil {
		return nil, fmt.Errorf("no preset is named %q; the presets are %s", name, strings.Join(Presets(), ", "))
	}
	defer f.Close()
	return ReadModel(f)
}

// ReadModel reads a model in the form of the files in models/. All keys except
// the name are required.
func ReadModel(r io.Reader) (*Model, error) {
	m := new(Model)
	md, err := toml.NewDecoder(r).Decode(m)
	if err != nil {
		return nil, fmt.Errorf("read model: %w", err)
	}
	if extra := md.Undecoded(); len(extra) > 0 {
		return nil, fmt.Errorf("read model: unknown key %q", extra[0])
	}
	for _, n := range []struct {
		key      string
		value    float64
		positive bool
	}{
		{"prefill_us_per_token", m.PrefillMicros, true},
		{"prefill_attention_us_per_token_and_position", m.PrefillAttentionMicros, false},
		{"prefill_us_per_request", m.PrefillRequestMicros, false},
		{"prefill_chunk_tokens", float64(m.ChunkTokens), true},
		{"decode_us_per_step", m.DecodeMicros, true},
		{"decode_us_per_request", m.DecodeRequestMicros, false},
		{"decode_us_per_kv_token", m.DecodeTokenMicros, false},
		{"decode_max_requests", float64(m.DecodeRequests), true},
		{"decode_kv_tokens", float64(m.DecodeTokens), true},
		{"transfer_us_per_request", m.TransferMicros, false},
		{"transfer_us_per_token", m.TransferTokenMicros, false},
		{"kv_bytes_per_token", m.KVBytes, true},
		{"slo_ttft_ms", m.TTFTMillis, true},
		{"slo_itl_ms", m.ITLMillis, true},
	} {
		switch {
		case !md.IsDefined(n.key):
			return nil, fmt.Errorf("read model: %s is missing", n.key)
		case n.value < 0 || n.positive && n.value == 0:
			return nil, fmt.Errorf("read model: %s is %v", n.key, n.value)
		}
	}
	return m, nil
}

// prefill returns the time in which one rank computes the tokens [from, to) of
// a prompt.
func (m *Model) prefill(from, to int) time.Duration {
	n := float64(to - from)
	return micros(m.PrefillMicros*n + m.PrefillAttentionMicros*n*float64(from+to)/2)
}

// work returns the time that a prompt takes on one rank which holds its first
// tokens.
func (m *Model) work(held, prompt int) time.Duration {
	return micros(m.PrefillRequestMicros) + m.prefill(held, prompt)
}

// step returns the time of a decode step.
func (m *Model) step(requests, tokens int) time.Duration {
	return micros(m.DecodeMicros + m.DecodeRequestMicros*float64(requests) + m.DecodeTokenMicros*float64(tokens))
}

// transfer returns the time of a transfer of that many tokens.
func (m *Model) transfer(tokens int) time.Duration {
	return micros(m.TransferMicros + m.TransferTokenMicros*float64(tokens))
}

func micros(n float64) time.Duration { return time.Duration(n * float64(time.Microsecond)) }
