package edge

import (
	"context"
	"log/slog"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

func TestMain(m *testing.M) { proxytest.Main(m) }

// served is a Server with a handler on loopback sockets.
type served struct {
	*Server
	running atomic.Int64 // requests
	end     context.CancelFunc
	ended   chan error
	stopped atomic.Bool
}

// serve starts a server. change adapts its configuration. The end of the test stops it
// and fails the test unless the drain was clean.
func serve(t *testing.T, h http.Handler, change func(*config.Config, *Options)) *served {
	t.Helper()
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	s := &served{ended: make(chan error, 1)}
	o := Options{
		Limits:  func() *config.Limits { return &cfg.Limits },
		Running: func() int { return int(s.running.Load()) }, OnDrain: func() {},
		CutGrace: time.Second,
		Log:      slog.New(slog.DiscardHandler),
	}
	change(&cfg, &o)
	var err error
	if s.Server, err = Listen(&cfg, o); err != nil {
		t.Fatal(err)
	}
	s.Handle(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.running.Add(1)
		defer s.running.Add(-1)
		h.ServeHTTP(w, r)
	}), http.NotFoundHandler())
	ctx, cancel := context.WithCancel(context.Background())
	s.end = cancel
	go func() {
		s.ended <- s.Serve(ctx, Limits{
			Drain:     func() time.Duration { return time.Duration(cfg.Server.DrainTimeout) },
			Remaining: func() time.Duration { return time.Duration(cfg.Server.TakeoverTimeout) },
		})
	}()
	t.Cleanup(func() {
		if err := s.stop(); err != nil {
			t.Errorf("got %v, want a clean drain", err)
		}
	})
	return s
}

// stop drains the server. A second call does nothing.
func (s *served) stop() error {
	if s.stopped.Swap(true) {
		return nil
	}
	s.end()
	return <-s.ended
}

// openPlaces returns the number of counted connections.
func openPlaces(c *connections) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.count()
}
