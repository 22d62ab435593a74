package exchange

import (
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/continuation"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// TestRewriteCountsFirst: the request that continues a stream is counted before it is allocated, and
// frees its memory with the body. If there is no room, it is not allocated.
func TestRewriteCountsFirst(t *testing.T) {
	ids := make([]uint32, 200_000)
	text := continuation.TextOf(ids)
	long := strings.Repeat("x", 1<<20)
	for name, c := range map[string]struct {
		api   openai.API
		body  string
		least int // that is counted
	}{
		"completions":     {openai.Completions, `{"model":"m","prompt":"x","stream":true}`, text},
		"chat":            {openai.Chat, `{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true}`, 2 * text},
		"chat with tools": {openai.Chat, `{"model":"m","messages":[{"role":"user","content":"` + long + `"}],"tools":[{"type":"function"}],"stream":true}`, 2*text + len(long)},
		"tokens":          {openai.VLLMGenerate, `{"token_ids":[1],"sampling_params":{"x":"` + long + `"},"stream":true}`, text + 5*len(long)},
	} {
		t.Run(name, func(t *testing.T) {
			for _, enough := range []bool{true, false} {
				x, memory := new(exchange), new(buffer.Budget)
				cfg := config.Default()
				memory.SetLimit(1 << 30)
				x.client.Open(downstream.NewBodies(memory, func() *config.Config { return &cfg }, nil), &cfg, httptest.NewRecorder(), httptest.NewRequest("POST", "/", nil))
				x.req.API, x.req.Memory = c.api, &x.client
				x.env.Client, x.env.Request, x.env.Prompt = &x.client, &x.req, &x.prompt
				var r openai.Request
				if err := openai.ParseRequest(c.api, []byte(c.body), &r); err != nil {
					t.Fatal(err)
				}
				if !enough {
					memory.SetLimit(256 << 10)
				}
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				ok := x.rewrite(&r, ids, 9)
				runtime.ReadMemStats(&after)
				if took := after.TotalAlloc - before.TotalAlloc; ok != enough || !enough && took > 256<<10 {
					t.Errorf("%t, and %d bytes are allocated", ok, took)
				}
				if n := memory.Used(); enough && (n < int64(c.least) || n > 2*int64(c.least)+1<<20) {
					t.Errorf("%d bytes are counted, want %d", n, c.least)
				}
				if x.env.ReleaseBody(); memory.Used() != 0 || x.env.PromptIDs != nil {
					t.Errorf("%d bytes are counted behind the answer's begin", memory.Used())
				}
				x.client.Close()
			}
		})
	}
}
