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
