package downstream_test

import (
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

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
