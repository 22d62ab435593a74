package downstream_test

import (
	"io"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// bodyOf is a request whose body has n bytes.
func bodyOf(n int) string {
	const around = `{"model":"m","prompt":"","max_tokens":5}`
	return `{"model":"m","prompt":"` + strings.Repeat("a", n-len(around)) + `","max_tokens":5}`
}

func within(limit config.ByteSize) func(*config.Config) {
	return func(c *config.Config) { c.Limits.BufferMemory = limit }
}

// If the memory for a request is in use, the proxy rejects the request with a status for
// retries. If the request exceeds the whole memory, the status differs. The proxy serves
// both requests when the memory suffices.
func TestBodyWithoutMemory(t *testing.T) {
	const limit = 8 << 20
	tests := []struct {
		name   string
		taken  int64 // by others
		size   int
		sized  bool
		status int
		code   string
	}{
		{"fits", 0, 1 << 20, true, 200, ""},
		{"fits, of unknown size", 0, 1 << 20, false, 200, ""},
		{"not now", limit - 1<<20, 1 << 20, true, 503, "memory_limit"},
		{"not now, of unknown size", limit - 1<<20, 1 << 20, false, 503, "memory_limit"},
		{"not a byte", limit, 100, true, 503, "memory_limit"},
		{"never", 0, limit + 1, true, 413, "body_too_large"},
		{"never, of unknown size", 0, limit + 1, false, 413, "body_too_large"},
		{"never, together with the memory of the leg", 0, limit - 1<<16, true, 413, "body_too_large"},
	}
	for _, tt := range tests {
		world.Run(t, tt.name, func(t *testing.T) {
			w := world.New(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}}, Config: within(limit)})
			w.Memory.Take(tt.taken)
			var body io.Reader = strings.NewReader(bodyOf(tt.size))
			if !tt.sized {
				body = io.MultiReader(body)
			}
			resp, err := w.Client.Post("http://proxy"+world.CompletionsPath, "application/json", body)
			if err != nil {
				t.Fatal(err)
			}
			text, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != tt.status || !strings.Contains(string(text), tt.code) {
				t.Errorf("got status %d, want %d: %.300s", resp.StatusCode, tt.status, text)
			}
			shed := 0.0
			if tt.status == 503 {
				shed = 1
				if resp.Header.Get("Retry-After") == "" {
					t.Error("no Retry-After")
				}
			}
			if n := w.Metric("pdproxy_shed_total", tt.code); n != shed {
				t.Errorf("got %v counted refusals, want %v", n, shed)
			}
			w.Memory.Release(tt.taken)
			synctest.Wait()
		})
	}
}
