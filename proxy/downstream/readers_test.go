package downstream

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// The limit of a body is a rate, not a total time. Only the time in which the proxy waits for bytes
// counts.
func TestBodyRate(t *testing.T) {
	cfg := config.Default()
	cfg.Server.ReadTimeout = config.Duration(100 * time.Second)
	tests := []struct {
		name    string
		got     int64
		waited  time.Duration // in earlier reads
		waiting time.Duration // in the current read; 0: there is no current read
		want    *openai.Error
	}{
		{"within the grace", 0, 0, 5 * time.Second, nil},
		{"behind the grace", 1, 0, 6 * time.Second, errBodySlow},
		{"in two reads", 1, 3 * time.Second, 3 * time.Second, errBodySlow},
		{"fast enough", 1 << 10, 0, 6 * time.Second, nil},
		{"fast enough for a long time", 85 << 10, 85 * time.Second, 5 * time.Second, nil},
		{"too slow at the end", 84 << 10, 85 * time.Second, 5 * time.Second, errBodySlow},
		{"not waited for", 1, 5 * time.Second, 0, nil},
		{"too long", 1 << 30, 50 * time.Second, 51 * time.Second, errBodyTimeout},
	}
	for _, tt := range tests {
		now := time.Now()
		b := bodyFor("a")
		b.got.Store(tt.got)
		b.waited.Store(int64(tt.waited))
		if tt.waiting > 0 {
			b.since.Store(now.Add(-tt.waiting).UnixNano())
		}
		if got := b.tooSlow(now.UnixNano(), &cfg); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
	cfg.Server.MinBodyRate = 0
	b := bodyFor("a")
	b.waited.Store(int64(99 * time.Second))
	if why := b.tooSlow(time.Now().UnixNano(), &cfg); why != nil {
		t.Errorf("without a rate: got %v", why)
	}
}

func bodyFor(client string) *incoming { return &incoming{client: client} }

// enterAll starts bodies in that order, with a pause after each.
func enterAll(l *readers, cfg *config.Config, pause time.Duration, bodies ...*incoming) {
	for _, b := range bodies {
		now := time.Now()
		b.since.Store(now.UnixNano())
		l.enter(b, now, cfg)
		time.Sleep(pause)
	}
}

// If the places are used up, the body that is furthest behind the rate stops: among the
// bodies of a client with more than its share, or among all bodies. While no body is
// slow, it is a body of the client with the most bodies.
func TestReadersTakeTheSlowest(t *testing.T) {
	tests := []struct {
		name   string
		limits config.Limits
		got    []int64 // bytes of the bodies of these clients: a, a, b, a
		pause  time.Duration
		want   int // index of the body that stops when client a starts another body
	}{
		{"the oldest of equal bodies", config.Limits{MaxExchanges: 4}, []int64{1, 1, 1, 1}, time.Second, 0},
		{"not a body that makes progress", config.Limits{MaxExchanges: 4}, []int64{1 << 20, 1, 1, 1}, time.Second, 1},
		{"of all clients", config.Limits{MaxExchanges: 4}, []int64{1 << 20, 1 << 20, 1, 1}, time.Second, 2},
		{"not the newest body without a byte", config.Limits{MaxExchanges: 4}, []int64{1, 1 << 20, 1 << 20, 0}, time.Second, 0},
		{"a body of the same client", config.Limits{MaxExchanges: 100, PerClient: 3}, []int64{1 << 20, 1 << 20, 0, 1}, time.Second, 3},
		{"by the limit of the client", config.Limits{MaxExchanges: 100, MaxReading: 4}, []int64{1, 1, 1, 1}, time.Second, 0},
		{"while none is slow, of the client with the most bodies", config.Limits{MaxExchanges: 4, PerClient: 4}, []int64{1 << 20, 1 << 20, 0, 1}, time.Millisecond, 3},
		{"a slow body of another client", config.Limits{MaxExchanges: 4, PerClient: 4}, []int64{1 << 20, 1 << 20, 0, 1 << 20}, time.Second, 2},
		{"without limits for clients", config.Limits{MaxExchanges: 4}, []int64{1 << 20, 1 << 20, 0, 1}, time.Millisecond, 2},
		{"none", config.Limits{MaxExchanges: 5}, []int64{1, 1, 1, 1}, time.Second, -1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var l readers
				cfg := &config.Config{Limits: tt.limits}
				bodies := []*incoming{bodyFor("a"), bodyFor("a"), bodyFor("b"), bodyFor("a")}
				for _, b := range bodies {
					b.rc = *http.NewResponseController(httptest.NewRecorder())
				}
				enterAll(&l, cfg, tt.pause, bodies...)
				for i, n := range tt.got {
					bodies[i].got.Store(n)
				}
				more := bodyFor("a")
				enterAll(&l, cfg, tt.pause, more)
				for i, b := range bodies {
					if stopped := b.why != nil && errors.Is(b.why, ErrReading); stopped != (i == tt.want) {
						t.Errorf("body %d: got stopped %v", i, stopped)
					}
				}
				for _, b := range append(bodies, more) {
					l.leave(b)
					l.leave(b) // again: nothing
				}
				if l.len() != 0 || len(l.clients) != 0 || len(l.sizes) != 0 {
					t.Errorf("got %d remaining bodies of %d clients", l.len(), len(l.clients))
				}
				time.Sleep(2 * sweepEvery)
			})
		})
	}
}

// The limit of time and rate holds for bodies inside and outside of the heaps.
func TestReadersSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l readers
		cfg := &config.Config{Limits: config.Limits{MaxExchanges: 2}}
		cfg.Server.MinBodyRate = 1 << 10
		bodies := []*incoming{bodyFor("a"), bodyFor("a"), bodyFor("b")}
		for _, b := range bodies {
			b.rc = *http.NewResponseController(httptest.NewRecorder())
		}
		enterAll(&l, cfg, time.Millisecond, bodies...)
		if len(l.unsorted) != 1 || len(l.all.list) != 1 {
			t.Fatalf("%d bodies outside of the heaps and %d inside, want 1 and 1", len(l.unsorted), len(l.all.list))
		}
		time.Sleep(rateGrace)
		if l.len() != 2 {
			t.Fatalf("%d bodies within the grace, want 2", l.len())
		}
		time.Sleep(2 * sweepEvery)
		for i, want := range []error{ErrReading, errBodySlow, errBodySlow} {
			if got := bodies[i].leave(); got == nil || !errors.Is(got, want) {
				t.Errorf("body %d: stopped by %v, want %v", i, got, want)
			}
		}
		if l.len() != 0 || len(l.clients) != 0 {
			t.Errorf("%d bodies of %d clients remain", l.len(), len(l.clients))
		}
	})
}

func BenchmarkReaders(b *testing.B) {
	var l readers
	cfg := config.Default()
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		body := bodyFor("10.0.0.1")
		for pb.Next() {
			l.enter(body, time.Now(), &cfg)
			l.leave(body)
		}
	})
}
