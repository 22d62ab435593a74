package exchange_test

import (
	"strings"
	"testing"
	"testing/synctest"

	"github.com/klauspost/compress/zstd"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// zstdWhole compresses a text. The frame's head contains the size of the text.
func zstdWhole(t testing.TB, text string) string {
	z, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	return string(z.EncodeAll([]byte(text), nil))
}

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
		{"gzip", "gzip", world.Gzipped(plain), 200},
		{"gzip in capitals, with another name", "X-GZIP", world.Gzipped(plain), 200},
		{"gzip in two members", "gzip", world.Gzipped(plain[:100], plain[100:]), 200},
		{"zstd", "zstd", world.Zstd(t, plain), 200},
		{"zstd with its size", " zstd ", zstdWhole(t, plain), 200},
		{"zstd in two frames", "zstd", world.Zstd(t, plain[:100]) + zstdWhole(t, plain[100:]), 200},
		{"gzip, plain", "gzip", plain, 400},
		{"zstd, plain", "zstd", plain, 400},
		{"gzip cut", "gzip", world.Gzipped(plain)[:50], 400},
		{"zstd cut", "zstd", world.Zstd(t, plain)[:50], 400},
		{"gzip with bytes after its end", "gzip", world.Gzipped(plain) + "more", 400},
		{"zstd with bytes after its end", "zstd", world.Zstd(t, plain) + "more", 400},
		{"zstd with a window of 16 MiB", "zstd", world.Zstd(t, strings.Repeat(plain, 1700), zstd.WithWindowSize(16<<20)), 400},
		{"deflate", "deflate", plain, 415},
		{"brotli", "br", plain, 415},
		{"two codings", "gzip, zstd", plain, 415},
		{"twice the same", "gzip, gzip", world.Gzipped(world.Gzipped(plain)), 415},
		{"gzip, one byte above the limit", "gzip", world.Gzipped(plain + strings.Repeat(" ", limit+1-len(plain))), 413},
		{"zstd, one byte above the limit", "zstd", world.Zstd(t, plain+strings.Repeat(" ", limit+1-len(plain))), 413},
		{"gzip bomb", "gzip", world.Gzipped(strings.Repeat(" ", 20*limit)), 413},
		{"zstd bomb", "zstd", world.Zstd(t, strings.Repeat(" ", 20*limit)), 413},
		{"zstd bomb with its size", "zstd", zstdWhole(t, strings.Repeat(" ", 20*limit)), 413},
		{"zstd with a size above the real one", "zstd", "\x28\xb5\x2f\xfd\xa0\xff\xff\xff\x7f" + strings.Repeat("a", 20), 413},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
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
		})
	}
}
