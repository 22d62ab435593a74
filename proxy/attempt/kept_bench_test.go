package attempt

import (
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// BenchmarkEvent is the work for one event of a stream: the scanner alone, and with what is kept so
// that another engine can continue the stream.
func BenchmarkEvent(b *testing.B) {
	const event = `data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1764000000,"model":"qwen3-32b","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null%s}]}` + "\n\n"
	for _, kept := range []bool{false, true} {
		name, text := "off", fmt.Sprintf(event, "")
		if kept {
			name, text = "on", fmt.Sprintf(event, `,"token_ids":[151644]`)
		}
		b.Run(name, func(b *testing.B) {
			k := keptForTest(b)
			var s openai.EventScanner
			piece := make([]byte, len(text))
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				copy(piece, text)
				whole := s.Feed(piece)
				if kept {
					if i%4096 == 0 {
						k.IDs = k.IDs[:0]
					}
					whole, _, _ = k.relay(whole)
				}
				if strings.Contains(text, "token_ids") == (len(whole) == len(text)) {
					b.Fatalf("%q", whole)
				}
			}
		})
	}
}

// keptForTest returns what is kept of a stream whose prompt has three ids.
func keptForTest(t testing.TB) *Kept {
	t.Helper()
	k := keptOf(t, openai.Completions, `{"prompt":"x","stream":true}`, "1,2,3")
	if k.Reason != "" || k.Prompt != 3 {
		t.Fatalf("%q, %d ids", k.Reason, k.Prompt)
	}
	return k
}

// keptOf returns what is kept of the stream of a request whose prompt has these ids.
func keptOf(t testing.TB, api openai.API, body, prompt string) *Kept {
	t.Helper()
	c, _ := openClient(t, 1<<20)
	k := &Kept{Limit: 1 << 20}
	t.Cleanup(k.End)
	k.take(c, headOf(prompt))
	k.begin(c, requestOf(t, api, body))
	return k
}

// headOf returns the start of an answer with the ids of its prompt.
func headOf(prompt string) *buffer.Buffer {
	head := buffer.Get(1)
	head.B = append(head.B, `data: {"choices":[{"text":"","prompt_token_ids":[`+prompt+`]}]}`+"\n\n"...)
	return head
}

func requestOf(t testing.TB, api openai.API, body string) *openai.Request {
	t.Helper()
	req := new(openai.Request)
	if err := openai.ParseRequest(api, []byte(body), req); err != nil {
		t.Fatal(err)
	}
	return req
}

// openClient returns a client whose memory is limited. The test ends with an error if some of the memory is
// still counted at the end.
func openClient(t testing.TB, limit int64) (*downstream.Client, *buffer.Budget) {
	t.Helper()
	cfg := config.Default()
	memory := new(buffer.Budget)
	memory.SetLimit(limit)
	r := httptest.NewRequest("POST", "/v1/completions", nil)
	c := new(downstream.Client)
	c.Open(downstream.NewBodies(memory, func() *config.Config { return &cfg }, nil), &cfg, httptest.NewRecorder(), r)
	t.Cleanup(func() {
		c.Close()
		if n := memory.Used(); n != 0 {
			t.Errorf("%d bytes are counted at the end", n)
		}
	})
	return c, memory
}
