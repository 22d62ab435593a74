package downstream_test

import (
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
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

// Bodies that grow when the proxy decodes them: one client holds at most half of the
// budget, unless clients are not counted. A body that the proxy forwards unchanged counts
// once.
func TestClientMemory(t *testing.T) {
	const limit, body, requests = 16 << 20, 1<<20 - 100, 12
	for _, tt := range []struct {
		name      string
		perClient int
		refused   bool
	}{{"counted", 100, true}, {"not counted", 0, false}} {
		world.Run(t, tt.name, func(t *testing.T) {
			answer := make(chan struct{})
			e := &world.Engine{Serve: func(c *world.Conn, _ int) { <-answer; c.JSON(200, world.Unary) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) {
				c.Limits.BufferMemory, c.Limits.PerClient = limit, tt.perClient
			}})
			coded := proxytest.Gzipped(bodyOf(body))
			statuses := make(chan int, requests)
			var wg sync.WaitGroup
			for range requests {
				wg.Go(func() {
					a := w.Post(world.CompletionsPath, coded, "Content-Encoding", "gzip")
					if a.Status == 429 && (!strings.Contains(a.Body, "client_memory_limit") || a.Header.Get("Retry-After") == "") {
						t.Errorf("%+v", a)
					}
					statuses <- a.Status
				})
				synctest.Wait()
			}
			used := w.Memory.Used()
			if most := int64(len(e.Seen())) * (1<<20 + 64<<10); used > most {
				t.Errorf("got %d bytes for %d requests, want at most %d", used, len(e.Seen()), most)
			}
			if tt.refused && used > limit/2 {
				t.Errorf("one client holds %d of %d bytes", used, limit)
			}
			close(answer)
			wg.Wait()
			close(statuses)
			count := map[int]int{}
			for s := range statuses {
				count[s]++
			}
			if (count[429] > 0) != tt.refused || count[200] == 0 || count[200]+count[429] != requests {
				t.Errorf("answers by status: %v", count)
			}
			if n := w.Metric("pdproxy_shed_total", "client_memory_limit"); n != float64(count[429]) {
				t.Errorf("got %v requests counted as shed, want %d", n, count[429])
			}
			if a := w.Post(world.CompletionsPath, coded, "Content-Encoding", "gzip"); a.Status != 200 {
				t.Errorf("afterwards: %+v", a)
			}
			synctest.Wait()
			if n := w.Memory.Used(); n != 0 {
				t.Errorf("got %d bytes at the end, want 0", n)
			}
		})
	}
}
