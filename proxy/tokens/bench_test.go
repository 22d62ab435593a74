package tokens

import (
	"context"
	"strconv"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// still answers at once.
type still struct{ answer []byte }

func (s still) Ask(context.Context, string, string, []byte) (int, []byte, error) {
	return 200, s.answer, nil
}

// BenchmarkTokens measures the cost of a chat request of 32 KB and 8,000 tokens, without
// the engine's own time.
func BenchmarkTokens(b *testing.B) {
	r := request(b, openai.Chat, `{"model":"m","messages":[{"role":"user","content":"`+strings.Repeat("lorem ipsum dolor ", 1800)+`"}],"stream":true}`)
	answer := []byte(`{"request_id":"x","token_ids":[1`)
	for i := range 8000 {
		answer = append(answer, ", "...)
		answer = strconv.AppendInt(answer, int64(i*16), 10)
	}
	answer = append(answer, `]}`...)
	for _, tt := range []struct {
		name string
		o    Options
	}{
		{"asked", Options{CacheTokens: -1, Asker: still{answer}}},
		{"cached", Options{Asker: still{answer}}},
	} {
		b.Run(tt.name, func(b *testing.B) {
			tk := New(tt.o)
			p := Prompt{Request: r, Model: "m", Instances: []Instance{{"a", VLLM}}}
			b.ReportAllocs()
			for b.Loop() {
				if got := tk.Tokens(b.Context(), p); len(got.IDs) != 8001 {
					b.Fatalf("got %+v", got)
				}
			}
		})
	}
}

func BenchmarkAppendIDs(b *testing.B) {
	raw := []byte("[1")
	for i := range 100000 {
		raw = append(raw, ',')
		raw = strconv.AppendInt(raw, int64(i), 10)
	}
	raw = append(raw, ']')
	var ids []uint32
	b.SetBytes(int64(len(raw)))
	b.ReportAllocs()
	for b.Loop() {
		ids, _ = AppendIDs(ids[:0], raw)
	}
}
