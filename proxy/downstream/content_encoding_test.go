package downstream_test

import (
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// A body with a Content-Encoding reaches engines decoded, or the proxy rejects it with an
// error that names the header.
func TestContentEncoding(t *testing.T) {
	plain := bodyOf(20 << 10)
	const limit = 1 << 20
	tests := []struct {
		name, coding, body string
		status             int
	}{
		{"plain", "identity", plain, 200},
		{"gzip", "gzip", proxytest.Gzipped(plain), 200},
		{"gzip in capitals, with another name", "X-GZIP", proxytest.Gzipped(plain), 200},
		{"gzip in two members", "gzip", proxytest.Gzipped(plain[:100], plain[100:]), 200},
		{"zstd", "zstd", proxytest.Zstd(t, plain), 200},
		{"zstd with its size", " zstd ", proxytest.ZstdSized(t, plain), 200},
		{"zstd in two frames", "zstd", proxytest.Zstd(t, plain[:100]) + proxytest.ZstdSized(t, plain[100:]), 200},
		{"gzip, plain", "gzip", plain, 400},
		{"zstd, plain", "zstd", plain, 400},
		{"gzip cut", "gzip", proxytest.Gzipped(plain)[:50], 400},
		{"zstd cut", "zstd", proxytest.Zstd(t, plain)[:50], 400},
		{"gzip with bytes after its end", "gzip", proxytest.Gzipped(plain) + "more", 400},
		{"zstd with bytes after its end", "zstd", proxytest.Zstd(t, plain) + "more", 400},
		{"zstd with a window of 16 MiB", "zstd", proxytest.Zstd(t, strings.Repeat(plain, 1700), zstd.WithWindowSize(16<<20)), 400},
		{"deflate", "deflate", plain, 415},
		{"brotli", "br", plain, 415},
		{"two codings", "gzip, zstd", plain, 415},
		{"twice the same", "gzip, gzip", proxytest.Gzipped(proxytest.Gzipped(plain)), 415},
		{"gzip, one byte above the limit", "gzip", proxytest.Gzipped(plain + strings.Repeat(" ", limit+1-len(plain))), 413},
		{"zstd, one byte above the limit", "zstd", proxytest.Zstd(t, plain+strings.Repeat(" ", limit+1-len(plain))), 413},
		{"gzip bomb", "gzip", proxytest.Gzipped(strings.Repeat(" ", 20*limit)), 413},
		{"zstd bomb", "zstd", proxytest.Zstd(t, strings.Repeat(" ", 20*limit)), 413},
		{"zstd bomb with its size", "zstd", proxytest.ZstdSized(t, strings.Repeat(" ", 20*limit)), 413},
		{"zstd with a size above the real one", "zstd", "\x28\xb5\x2f\xfd\xa0\xff\xff\xff\x7f" + strings.Repeat("a", 20), 413},
	}
	for _, tt := range tests {
		world.Run(t, tt.name, func(t *testing.T) {
			e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) { c.Server.MaxBody = limit }})
			a := w.Post(world.CompletionsPath, tt.body, "Content-Encoding", tt.coding)
			if a.Status != tt.status {
				t.Fatalf("got status %d, want %d: %s", a.Status, tt.status, a.Body)
			}
			switch tt.status {
			case 200:
				leg := e.Seen()[0]
				if leg.Body != plain || leg.Header["Content-Encoding"] != nil {
					t.Errorf("the engine got Content-Encoding %q and %d bytes", leg.Header["Content-Encoding"], len(leg.Body))
				}
			case 400, 415:
				if !strings.Contains(a.Body, "Content-Encoding") || len(e.Seen()) != 0 {
					t.Errorf("%d legs, %s", len(e.Seen()), a.Body)
				}
			}
			if got := a.Header.Get("Accept-Encoding"); (got == downstream.AcceptedCodings) != (tt.status == 415) {
				t.Errorf("Accept-Encoding %q", got)
			}
		})
	}
}
