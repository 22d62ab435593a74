package proxy

import (
	"bytes"
	"compress/gzip"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/klauspost/compress/zstd"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
)

func gzipped(parts ...string) string {
	var b bytes.Buffer
	for _, p := range parts {
		z := gzip.NewWriter(&b)
		z.Write([]byte(p))
		z.Close()
	}
	return b.String()
}

func zstdOf(t testing.TB, text string, o ...zstd.EOption) string {
	var b bytes.Buffer
	z, err := zstd.NewWriter(&b, append(o, zstd.WithEncoderConcurrency(1))...)
	if err != nil {
		t.Fatal(err)
	}
	z.Write([]byte(text))
	z.Close()
	return b.String()
}

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
		{"gzip", "gzip", gzipped(plain), 200},
		{"gzip in capitals, with another name", "X-GZIP", gzipped(plain), 200},
		{"gzip in two members", "gzip", gzipped(plain[:100], plain[100:]), 200},
		{"zstd", "zstd", zstdOf(t, plain), 200},
		{"zstd with its size", " zstd ", zstdWhole(t, plain), 200},
		{"zstd in two frames", "zstd", zstdOf(t, plain[:100]) + zstdWhole(t, plain[100:]), 200},
		{"gzip, plain", "gzip", plain, 400},
		{"zstd, plain", "zstd", plain, 400},
		{"gzip cut", "gzip", gzipped(plain)[:50], 400},
		{"zstd cut", "zstd", zstdOf(t, plain)[:50], 400},
		{"gzip with bytes after its end", "gzip", gzipped(plain) + "more", 400},
		{"zstd with bytes after its end", "zstd", zstdOf(t, plain) + "more", 400},
		{"zstd with a window of 16 MiB", "zstd", zstdOf(t, strings.Repeat(plain, 1700), zstd.WithWindowSize(16<<20)), 400},
		{"deflate", "deflate", plain, 415},
		{"brotli", "br", plain, 415},
		{"two codings", "gzip, zstd", plain, 415},
		{"twice the same", "gzip, gzip", gzipped(gzipped(plain)), 415},
		{"gzip, one byte above the limit", "gzip", gzipped(plain + strings.Repeat(" ", limit+1-len(plain))), 413},
		{"zstd, one byte above the limit", "zstd", zstdOf(t, plain+strings.Repeat(" ", limit+1-len(plain))), 413},
		{"gzip bomb", "gzip", gzipped(strings.Repeat(" ", 20*limit)), 413},
		{"zstd bomb", "zstd", zstdOf(t, strings.Repeat(" ", 20*limit)), 413},
		{"zstd bomb with its size", "zstd", zstdWhole(t, strings.Repeat(" ", 20*limit)), 413},
		{"zstd with a size above the real one", "zstd", "\x28\xb5\x2f\xfd\xa0\xff\xff\xff\x7f" + strings.Repeat("a", 20), 413},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, unary) }}
				w := newWorld(t, setup{engines: []*fakeEngine{e}, config: func(c *config.Config) { c.Server.MaxBody = limit }})
				a := w.post(completionsPath, tt.body, "Content-Encoding", tt.coding)
				if a.status != tt.status {
					t.Fatalf("got status %d, want %d: %s", a.status, tt.status, a.body)
				}
				switch tt.status {
				case 200:
					leg := e.seen()[0]
					if leg.body != plain || leg.header["Content-Encoding"] != nil {
						t.Errorf("the engine got Content-Encoding %q and %d bytes", leg.header["Content-Encoding"], len(leg.body))
					}
				case 400, 415:
					if !strings.Contains(a.body, "Content-Encoding") || len(e.seen()) != 0 {
						t.Errorf("%d legs, %s", len(e.seen()), a.body)
					}
				}
				if got := a.header.Get("Accept-Encoding"); (got == downstream.AcceptedCodings) != (tt.status == 415) {
					t.Errorf("Accept-Encoding %q", got)
				}
			})
		})
	}
}
