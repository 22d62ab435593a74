package proxy

import (
	"bytes"
	"compress/gzip"
	"errors"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/klauspost/compress/zstd"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
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

// zstdWhole names the size of the text in the head of its frame.
func zstdWhole(t testing.TB, text string) string {
	z, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	return string(z.EncodeAll([]byte(text), nil))
}

// A body that the client has coded reaches engines plain, or is refused by name.
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
		{"gzip with a rest", "gzip", gzipped(plain) + "more", 400},
		{"zstd with a rest", "zstd", zstdOf(t, plain) + "more", 400},
		{"zstd with a window of 16 MiB", "zstd", zstdOf(t, strings.Repeat(plain, 1700), zstd.WithWindowSize(16<<20)), 400},
		{"deflate", "deflate", plain, 415},
		{"brotli", "br", plain, 415},
		{"two codings", "gzip, zstd", plain, 415},
		{"twice the same", "gzip, gzip", gzipped(gzipped(plain)), 415},
		{"gzip, a byte more than the limit", "gzip", gzipped(plain + strings.Repeat(" ", limit+1-len(plain))), 413},
		{"zstd, a byte more than the limit", "zstd", zstdOf(t, plain+strings.Repeat(" ", limit+1-len(plain))), 413},
		{"gzip bomb", "gzip", gzipped(strings.Repeat(" ", 20*limit)), 413},
		{"zstd bomb", "zstd", zstdOf(t, strings.Repeat(" ", 20*limit)), 413},
		{"zstd bomb that says so", "zstd", zstdWhole(t, strings.Repeat(" ", 20*limit)), 413},
		{"zstd that says more than there is", "zstd", "\x28\xb5\x2f\xfd\xa0\xff\xff\xff\x7f" + strings.Repeat("a", 20), 413},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, unary) }}
				w := newWorld(t, setup{engines: []*fakeEngine{e}, config: func(c *config.Config) { c.Server.MaxBody = limit }})
				a := w.post(completionsPath, tt.body, "Content-Encoding", tt.coding)
				if a.status != tt.status {
					t.Fatalf("status %d, want %d: %s", a.status, tt.status, a.body)
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
				if got := a.header.Get("Accept-Encoding"); (got == acceptedCodings) != (tt.status == 415) {
					t.Errorf("Accept-Encoding %q", got)
				}
			})
		})
	}
}

// What decoding takes is bounded by what comes out, and that by the limits.
func FuzzDecodeBody(f *testing.F) {
	plain := bodyOf(300)
	for _, zipped := range []bool{true, false} {
		for _, s := range []string{gzipped(plain), zstdOf(f, plain), zstdWhole(f, plain), zstdOf(f, strings.Repeat("a", 1<<20)), "\x28\xb5\x2f\xfd\xa0\xff\xff\xff\x7f"} {
			f.Add([]byte(s), zipped)
		}
	}
	f.Fuzz(func(t *testing.T, coded []byte, zipped bool) {
		const limit = 64 << 10
		memory := new(buffer.Budget)
		memory.SetLimit(1 << 20)
		x := exchangeOf(&Server{memory: memory, zstd: newUnzstd})
		x.body = buffer.Get(len(coded))
		x.body.B = append(x.body.B, coded...)
		h := http.Header{"Content-Encoding": {"zstd"}}
		if zipped {
			h.Set("Content-Encoding", "gzip")
		}
		decode, err := bodyCoding(h)
		if err != nil {
			t.Fatal(err)
		}
		most := buffer.Room(limit + 1)
		if !zipped { // its decoder wants room for whole blocks
			most = buffer.Room(limit + 2*maxBlock)
		}
		err = x.decode(decode, limit)
		if err == nil && (len(x.body.B) > limit || cap(x.body.B) > most) {
			t.Errorf("%d bytes of %d, which may be %d", len(x.body.B), cap(x.body.B), most)
		}
		x.body.Free()
		if memory.Used() != 0 {
			t.Errorf("%d bytes are counted of nothing", memory.Used())
		}
	})
}

// The decoder of zstd keeps nothing of a large frame.
func TestZstdKeepsNothing(t *testing.T) {
	coded := []byte(zstdOf(t, strings.Repeat(bodyOf(4000), 1000), zstd.WithWindowSize(8<<20)))
	x := exchangeOf(&Server{memory: new(buffer.Budget), zstd: sync.OnceValue(newUnzstd)})
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range 20 {
		if err := x.unzstd(coded, 16<<20); err != nil {
			t.Fatal(err)
		}
		x.body.Free()
		x.body = nil
	}
	runtime.GC()
	runtime.GC() // the pools too
	runtime.ReadMemStats(&after)
	if kept := int64(after.HeapAlloc) - int64(before.HeapAlloc); kept > 4<<20 {
		t.Errorf("%d bytes are kept", kept)
	}
}

// The size that a frame of zstd names takes no memory before its bytes are there.
func TestZstdAnnouncedSize(t *testing.T) {
	memory := new(buffer.Budget)
	memory.SetLimit(1 << 20)
	x := exchangeOf(&Server{memory: memory, zstd: sync.OnceValue(newUnzstd)})
	// One segment, a size of 15 MiB in four bytes, and a block that is not there.
	err := x.unzstd([]byte("\x28\xb5\x2f\xfd\xa0\x00\x00\xf0\x00\x01"), 16<<20)
	if !errors.Is(err, errCoded) {
		t.Errorf("%v, want that the body is broken: the memory that it names is not there", err)
	}
	x.body.Free()
	if n := memory.Used(); n != 0 {
		t.Errorf("%d bytes are held", n)
	}
}
