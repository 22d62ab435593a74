package edge

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
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

// TestBrokenConnection: with net/http, a deadline ends the reading of a connection after the head of an
// answer. The next request of the connection gets a clear answer, and the connection closes.
func TestBrokenConnection(t *testing.T) {
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(200)
		rc := http.NewResponseController(w)
		rc.Flush()
		io.Copy(io.Discard, r.Body)
		rc.SetReadDeadline(time.Unix(1, 0)) // ends the read by which net/http notices that a client leaves
		<-r.Context().Done()
	}), func(cfg *config.Config, _ *Options) { cfg.Server.HTTP1 = config.HTTP1NetHTTP })
	c, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	in := bufio.NewReader(c)
	for _, want := range []string{"200 OK ", "503 Service Unavailable connection_broken"} {
		io.WriteString(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc")
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		var body struct{ Error struct{ Code string } }
		text, _ := io.ReadAll(resp.Body)
		json.Unmarshal(text, &body)
		if got := resp.Status + " " + body.Error.Code; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		if last := resp.StatusCode == 503; resp.Close != last || last && resp.Header.Get("Retry-After") == "" {
			t.Errorf("%s: close %v, header %v", resp.Status, resp.Close, resp.Header)
		}
	}
	if _, err := in.ReadByte(); err != io.EOF {
		t.Errorf("after the last answer: got %v, want EOF", err)
	}
}
