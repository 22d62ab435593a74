package downstream

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

// clientWith returns a client whose memory counts in that budget.
func clientWith(memory *buffer.Budget) *Client {
	var c Client
	cfg := config.Default()
	bodies := NewBodies(memory, func() *config.Config { return &cfg }, func(*http.Request) string { return "" })
	c.Open(bodies, &cfg, httptest.NewRecorder(), httptest.NewRequest("POST", "/", nil))
	return &c
}

// bodyOf returns a request whose body has n bytes.
func bodyOf(n int) string {
	const around = `{"model":"m","prompt":"","max_tokens":5}`
	return `{"model":"m","prompt":"` + strings.Repeat("a", n-len(around)) + `","max_tokens":5}`
}

// The size of the decoded text bounds the memory for decoding, and the limits bound that
// size.
func FuzzDecodeBody(f *testing.F) {
	plain := bodyOf(300)
	for _, zipped := range []bool{true, false} {
		for _, s := range []string{proxytest.Gzipped(plain), proxytest.Zstd(f, plain), proxytest.ZstdSized(f, plain), proxytest.Zstd(f, strings.Repeat("a", 1<<20)), "\x28\xb5\x2f\xfd\xa0\xff\xff\xff\x7f"} {
			f.Add([]byte(s), zipped)
		}
	}
	f.Fuzz(func(t *testing.T, coded []byte, zipped bool) {
		const limit = 64 << 10
		memory := new(buffer.Budget)
		memory.SetLimit(1 << 20)
		c := clientWith(memory)
		c.body = buffer.Get(len(coded))
		c.body.B = append(c.body.B, coded...)
		h := http.Header{"Content-Encoding": {"zstd"}}
		if zipped {
			h.Set("Content-Encoding", "gzip")
		}
		decode, err := decoderOf(h)
		if err != nil {
			t.Fatal(err)
		}
		most := buffer.Room(limit + 1)
		if !zipped { // the decoder needs room for whole blocks
			most = buffer.Room(limit + 2*maxBlock)
		}
		err = c.decode(decode, limit)
		if err == nil && (len(c.body.B) > limit || cap(c.body.B) > most) {
			t.Errorf("got %d bytes of memory for a text of %d bytes, want at most %d", len(c.body.B), cap(c.body.B), most)
		}
		c.body.Free()
		if memory.Used() != 0 {
			t.Errorf("got %d counted bytes after the end", memory.Used())
		}
	})
}

// The zstd decoder keeps no memory of a large frame.
func TestZstdKeepsNothing(t *testing.T) {
	coded := []byte(proxytest.Zstd(t, strings.Repeat(bodyOf(4000), 1000), zstd.WithWindowSize(8<<20)))
	c := clientWith(new(buffer.Budget))
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range 20 {
		if err := c.unzstd(coded, 16<<20); err != nil {
			t.Fatal(err)
		}
		c.body.Free()
		c.body = nil
	}
	runtime.GC()
	runtime.GC() // the collection empties the pools too
	runtime.ReadMemStats(&after)
	if kept := int64(after.HeapAlloc) - int64(before.HeapAlloc); kept > 4<<20 {
		t.Errorf("the decoder keeps %d bytes", kept)
	}
}

// The size in the head of a zstd frame takes no memory before its bytes arrive.
func TestZstdAnnouncedSize(t *testing.T) {
	memory := new(buffer.Budget)
	memory.SetLimit(1 << 20)
	c := clientWith(memory)
	// A frame of one segment: a size of 15 MiB in four bytes, and a block without its
	// bytes.
	err := c.unzstd([]byte("\x28\xb5\x2f\xfd\xa0\x00\x00\xf0\x00\x01"), 16<<20)
	if !errors.Is(err, errCoded) {
		t.Errorf("got %v, want the error for a broken body: the announced bytes are missing", err)
	}
	c.body.Free()
	if n := memory.Used(); n != 0 {
		t.Errorf("got %d bytes of memory", n)
	}
}
