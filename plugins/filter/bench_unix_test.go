//go:build unix

package filter

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/internal/dev/usage"
	"github.com/pdproxy/pdproxy/plugins/budget"
	"github.com/pdproxy/pdproxy/plugins/shared"
)

// sinkWriter is a ResponseWriter that costs nothing.
type sinkWriter struct{ header http.Header }

func (w *sinkWriter) Header() http.Header         { return w.header }
func (w *sinkWriter) WriteHeader(int)             {}
func (w *sinkWriter) Write(p []byte) (int, error) { return len(p), nil }
func (w *sinkWriter) FlushError() error           { return nil }

// BenchmarkChain measures the cost per request of filters that only read
// headers, including their last callbacks in the background.
func BenchmarkChain(b *testing.B) {
	for _, bb := range []struct {
		name    string
		filters int
		guarded bool
	}{{"none", 0, true}, {"one guarded", 1, true}, {"two guarded", 2, true}, {"three guarded", 3, true}, {"one trusted", 1, false}} {
		b.Run(bb.name, func(b *testing.B) {
			serve := readHeaders(b, bb.filters, bb.guarded)
			b.ReportAllocs()
			before := usage.ProcessTime()
			for b.Loop() {
				serve()
			}
			b.ReportMetric(float64(usage.ProcessTime()-before)/float64(b.N), "cpu-ns/op")
		})
	}
}

// readHeaders returns a function that passes a request through filters that
// only read headers.
func readHeaders(tb testing.TB, filters int, guarded bool) (serve func()) {
	var store shared.Store
	var plugins []*Plugin
	for range filters {
		p := New(Spec{Name: "h", Wasm: guests[headersOnly], Load: host.LoadOptions{Guarded: guarded, Cache: compiled}},
			Deps{Shared: &store, Budget: budget.New(1, time.Second, 0), Log: slog.New(slog.DiscardHandler)})
		if err := p.Start(context.Background()); err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { p.Close(context.Background()) })
		plugins = append(plugins, p)
	}
	var c Chain
	c.Set(plugins, Limits{})
	answer := bytes.Repeat([]byte("x"), 1024)
	h := c.Wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header()["Content-Type"] = []string{"application/json"}
		w.Write(answer)
	}))
	body := bytes.Repeat([]byte("y"), 2048)
	header := http.Header{"Content-Type": {"application/json"}, "User-Agent": {"bench"}, "Accept": {"*/*"}, "Authorization": {"Bearer x"}, "X-Request-Id": {"0123456789abcdef"}}
	return func() {
		req := &http.Request{Method: "POST", Host: "h", RequestURI: "/v1/completions", Header: header, Body: io.NopCloser(bytes.NewReader(body)), ContentLength: 2048, ProtoMajor: 1}
		h.ServeHTTP(&sinkWriter{http.Header{}}, req)
	}
}

// TestAllocationsOfFilters counts the allocations of a chain and of each of its
// filters per request. Without the gate, the engine's allocations would
// dominate.
func TestAllocationsOfFilters(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	var allocs [4]float64
	for n := range allocs {
		allocs[n] = testing.AllocsPerRun(500, readHeaders(t, n, true))
	}
	if first, more := allocs[1]-allocs[0], allocs[3]-allocs[1]; first > 22 || more > 7 {
		t.Errorf("%v allocations for 0 to 3 filters: the first brings %v, two more %v", allocs, first, more)
	}
}

// pausedBodies returns a function that passes a request through a filter that holds its body of so many
// chunks until the end.
func pausedBodies(tb testing.TB, chunks int) (serve func()) {
	var store shared.Store
	p := New(Spec{Name: "p", Wasm: guests[scripted], Config: "[main]\nrequest_body: !eos return 1", VMs: 1, Load: host.LoadOptions{Guarded: true, Cache: compiled, MemoryPages: 1024}},
		Deps{Shared: &store, Budget: budget.New(1, time.Second, 0), Log: slog.New(slog.DiscardHandler)})
	if err := p.Start(context.Background()); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { p.Close(context.Background()) })
	var c Chain
	c.Set([]*Plugin{p}, Limits{MaxBody: 16 << 20})
	got := 0
	h := c.Wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body) // a short body fails the comparison
		got = int(n)
	}))
	body := bytes.Repeat([]byte("y"), chunks*chunkOfBench)
	return func() {
		req := &http.Request{Method: "POST", Host: "h", RequestURI: "/v1/completions", Header: http.Header{}, Body: io.NopCloser(inChunks{bytes.NewReader(body)}), ContentLength: int64(len(body)), ProtoMajor: 1}
		h.ServeHTTP(&sinkWriter{http.Header{}}, req)
		if got != len(body) {
			tb.Fatalf("the handler got %d of %d bytes", got, len(body))
		}
	}
}

const chunkOfBench = 1 << 10 // bytes

// inChunks reads chunks of chunkOfBench.
type inChunks struct{ io.Reader }

func (r inChunks) Read(p []byte) (int, error) { return r.Reader.Read(p[:min(len(p), chunkOfBench)]) }

// BenchmarkPausedBody measures a chunk of a body that a filter holds until its end.
func BenchmarkPausedBody(b *testing.B) {
	const chunks = 256
	serve := pausedBodies(b, chunks)
	b.ReportAllocs()
	for b.Loop() {
		serve()
	}
	b.ReportMetric(float64(b.Elapsed())/float64(b.N)/chunks, "ns/chunk")
}

// TestAllocationsOfPausedBodies: a chunk of a held body needs no buffer and no goroutine of its own.
func TestAllocationsOfPausedBodies(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	few, many := testing.AllocsPerRun(50, pausedBodies(t, 10)), testing.AllocsPerRun(50, pausedBodies(t, 110))
	if each := (many - few) / 100; each > 2 {
		t.Errorf("%v and %v allocations for 10 and 110 chunks: %.1f for each", few, many, each)
	}
}
