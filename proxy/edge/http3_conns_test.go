package edge

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/quicvarint"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// serveHTTP3 starts a server with HTTP/3 on a new socket.
func serveHTTP3(t *testing.T, h http.HandlerFunc, change func(*config.Config)) *served {
	t.Helper()
	certs, err := LoadCerts("server.tls", config.TLS{SelfSigned: true}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return serve(t, h, func(c *config.Config, o *Options) {
		c.Server.HTTP3, o.Certs = anyPort, certs
		change(c)
	})
}

// dialQUIC opens a QUIC connection to w. The test writes the HTTP/3 frames itself.
func dialQUIC(t *testing.T, s *served, conf *quic.Config) (*quic.Conn, error) {
	t.Helper()
	c, err := quic.DialAddr(t.Context(), s.HTTP3Addr().String(),
		&tls.Config{InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}}, conf)
	if err == nil {
		t.Cleanup(func() { c.CloseWithError(0, "") })
	}
	return c, err
}

func mustDialQUIC(t *testing.T, s *served) *quic.Conn {
	t.Helper()
	c, err := dialQUIC(t, s, nil)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// openStream opens a stream and sends p on it.
func openStream(t *testing.T, c *quic.Conn, p []byte) *quic.Stream {
	t.Helper()
	s, err := c.OpenStreamSync(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Write(p); err != nil {
		t.Fatal(err)
	}
	return s
}

// headLimit is a short read_header_timeout. A handshake may pause for half of it, so it is longer than
// a busy machine delays a packet. QUIC's timers run in real time.
const headLimit = 2 * time.Second

// An incomplete request head ends its stream, not the connection. The limit of a head does not
// apply to the body.
func TestHTTP3HeadLimit(t *testing.T) {
	echo := func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) }
	w := serveHTTP3(t, echo, func(c *config.Config) { c.Server.ReadHeaderTimeout = config.Duration(headLimit) })
	c := mustDialQUIC(t, w)
	frame := quicvarint.Append(quicvarint.Append(nil, 1), 60000) // HEADERS
	parts := [][]byte{frame[:1], frame[:2], frame, append(frame, 0)}
	var streams []*quic.Stream
	for _, sent := range parts {
		streams = append(streams, openStream(t, c, sent))
	}
	for i, s := range streams {
		var reset *quic.StreamError
		if _, err := io.ReadAll(s); !errors.As(err, &reset) || reset.ErrorCode != quic.StreamErrorCode(http3.ErrCodeRequestIncomplete) {
			t.Errorf("after %x: %v", parts[i], err)
		}
	}

	tr := &http3.Transport{}
	defer tr.Close()
	body, late := io.Pipe()
	go func() {
		time.Sleep(headLimit + headLimit/4)
		io.WriteString(late, "late")
		late.Close()
	}()
	r, err := http.NewRequestWithContext(t.Context(), "POST", "https://proxy"+"/", body)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := tr.NewClientConn(c).RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got, err := io.ReadAll(resp.Body); err != nil || string(got) != "late" {
		t.Errorf("answer to a late body: got %d, %q, %v", resp.StatusCode, got, err)
	}
}

// The server closes a connection without a request after idle_timeout, although the
// client keeps it alive. Streams without requests do not change this.
func TestHTTP3Idle(t *testing.T) {
	w := serveHTTP3(t, nil, func(c *config.Config) {
		c.Server.ReadHeaderTimeout = config.Duration(headLimit)
		c.Server.IdleTimeout = config.Duration(200 * time.Millisecond)
	})
	for _, streams := range []int{0, 3} {
		c, err := dialQUIC(t, w, &quic.Config{KeepAlivePeriod: 10 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		for range streams {
			openStream(t, c, []byte{1})
		}
		<-c.Context().Done()
		var closed *quic.ApplicationError
		if err := context.Cause(c.Context()); !errors.As(err, &closed) || closed.ErrorCode != quic.ApplicationErrorCode(http3.ErrCodeNoError) {
			t.Errorf("%d streams: %v", streams, err)
		}
	}
}

// The number of streams of one connection is limited.
func TestHTTP3Streams(t *testing.T) {
	w := serveHTTP3(t, nil, func(*config.Config) {})
	c := mustDialQUIC(t, w)
	for i := range streamsPerConn {
		if _, err := c.OpenStream(); err != nil {
			t.Fatalf("stream %d: %v", i, err)
		}
	}
	if _, err := c.OpenStream(); !errors.As(err, new(*quic.StreamLimitReachedError)) {
		t.Errorf("one more: %v", err)
	}
	for range controlStreams {
		if _, err := c.OpenUniStream(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.OpenUniStream(); !errors.As(err, new(*quic.StreamLimitReachedError)) {
		t.Errorf("one more stream without a request: got %v", err)
	}
}

// The server refuses a connection before its handshake if no place is free and no idle
// connection can be closed. A connection that ends frees its place.
func TestHTTP3MaxConnections(t *testing.T) {
	release := make(chan struct{})
	w := serveHTTP3(t, func(http.ResponseWriter, *http.Request) { <-release }, func(c *config.Config) { c.Limits.MaxConnections = 1 })
	c := mustDialQUIC(t, w)
	tr := &http3.Transport{}
	defer tr.Close()
	conn := tr.NewClientConn(c)
	answered := make(chan error, 1)
	go func() {
		r, err := http.NewRequest("POST", "https://proxy"+"/", http.NoBody)
		if err == nil {
			var resp *http.Response
			if resp, err = conn.RoundTrip(r); err == nil {
				err = resp.Body.Close()
			}
		}
		answered <- err
	}()
	for w.running.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	var refused *quic.TransportError
	if _, err := dialQUIC(t, w, nil); !errors.As(err, &refused) || refused.ErrorCode != quic.ConnectionRefused {
		t.Errorf("the second connection: got %v", err)
	}
	close(release)
	if err := <-answered; err != nil {
		t.Errorf("the first connection: got %v", err)
	}
	for { // until the server counts the first connection as idle
		second, err := dialQUIC(t, w, nil)
		if err == nil {
			<-c.Context().Done()
			second.CloseWithError(0, "")
			break
		}
		if !errors.As(err, &refused) {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	for openPlaces(w.places) != 0 {
		time.Sleep(time.Millisecond)
	}
}

// While many handshakes run, clients have to prove their address.
func TestHTTP3Retry(t *testing.T) {
	for _, tt := range []struct {
		all, perAddress, handshaking int
		want                         bool
	}{
		{1000, 250, maxUnproven - 1, false}, {1000, 250, maxUnproven, true},
		{1000, 10, 4, false}, {1000, 10, 5, true}, {1, 1, 0, true}, {10, 0, 4, false}, {10, 0, 5, true},
	} {
		h, transport := new(http3Conns), new(quic.Transport)
		h.limit(transport, newConnections(func() (all, perAddress int) { return tt.all, tt.perAddress }))
		h.handshaking.Store(int64(tt.handshaking))
		if got := transport.VerifySourceAddress(nil); got != tt.want {
			t.Errorf("%+v: %t", tt, got)
		}
	}
	w := serveHTTP3(t, nil, func(c *config.Config) { c.Limits.MaxConnectionsPerAddress = 1 })
	c := mustDialQUIC(t, w) // by a Retry
	if n := openPlaces(w.places); n != 1 {
		t.Errorf("%d connections are open", n)
	}
	c.CloseWithError(0, "")
}

// leaving is a server with two connections, one without a request.
type leaving struct {
	*served
	t           *testing.T
	quiet, busy *quic.Conn
	client      *http3.ClientConn // of busy
	running     chan error        // result of the request that runs on busy
	release     chan struct{}     // ends that request
}

func newLeaving(t *testing.T, change func(*config.Config)) *leaving {
	l := &leaving{t: t, running: make(chan error, 1), release: make(chan struct{})}
	l.served = serveHTTP3(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/running" {
			select {
			case <-l.release:
			case <-r.Context().Done():
			}
		}
		io.WriteString(w, "whole")
	}, change)
	l.quiet, l.busy = mustDialQUIC(t, l.served), mustDialQUIC(t, l.served)
	tr := &http3.Transport{}
	t.Cleanup(func() { tr.Close() })
	l.client = tr.NewClientConn(l.busy)
	go func() { l.running <- l.get("/running") }()
	// The end of the listener refuses a connection whose handshake the server has not finished.
	for l.served.running.Load() == 0 || openPlaces(l.places) < 2 || l.quic.conns.handshaking.Load() > 0 {
		time.Sleep(time.Millisecond)
	}
	return l
}

func (l *leaving) get(path string) error {
	r, err := http.NewRequest("GET", "https://proxy"+path, http.NoBody)
	if err != nil {
		return err
	}
	resp, err := l.client.RoundTrip(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "whole" {
		return fmt.Errorf("got body %q, error %v", body, err)
	}
	return nil
}

// closed waits until the server has closed c with the code for requests that were not begun.
func (l *leaving) closed(what string, c *quic.Conn) {
	l.t.Helper()
	<-c.Context().Done()
	var closed *quic.ApplicationError
	if err := context.Cause(c.Context()); !errors.As(err, &closed) || closed.ErrorCode != quic.ApplicationErrorCode(http3.ErrCodeRequestRejected) {
		l.t.Errorf("%s: got %v", what, err)
	}
}

// endRunning ends the running request.
func (l *leaving) endRunning() {
	l.t.Helper()
	close(l.release)
	if err := <-l.running; err != nil {
		l.t.Errorf("the running request: got %v", err)
	}
	l.closed("the connection after its last request", l.busy)
}

// drained stops the server, and checks that it refuses later requests.
func (l *leaving) drained() {
	l.t.Helper()
	stopped := make(chan error, 1)
	go func() { stopped <- l.stop() }()
	<-l.quic.conns.grace.Done()
	l.closed("the connection without a request", l.quiet)
	var refused *http3.Error
	if err := l.get("/later"); !errors.As(err, &refused) || refused.ErrorCode != http3.ErrCodeRequestRejected {
		l.t.Errorf("a later request: got %v", err)
	}
	l.endRunning()
	if err := <-stopped; err != nil {
		l.t.Error(err)
	}
}

// A drain serves the running requests, and refuses later requests with the code for requests that
// the server has not begun. Each connection then ends with the same code, although its client keeps
// it open, so that the client can repeat a request that was under way.
func TestHTTP3Drain(t *testing.T) {
	newLeaving(t, func(*config.Config) {}).drained()
}

// After a takeover the server closes connections without a request. It serves later requests on
// the others, until they have none or the drain begins.
func TestHTTP3Takeover(t *testing.T) {
	for _, drain := range []bool{false, true} {
		t.Run(fmt.Sprintf("drain %t", drain), func(t *testing.T) {
			l := newLeaving(t, func(*config.Config) {})
			l.StopAccepting()
			l.closed("the connection without a request", l.quiet)
			if err := l.get("/later"); err != nil {
				t.Errorf("a later request: got %v", err)
			}
			if drain {
				l.drained()
				return
			}
			l.endRunning()
			if err := <-l.ended; err != nil {
				t.Error(err)
			}
			l.stopped.Store(true)
		})
	}
}

// After a takeover, requests run no longer than Limits.Remaining.
func TestHTTP3TakeoverLimit(t *testing.T) {
	l := newLeaving(t, func(c *config.Config) { c.Server.TakeoverTimeout = config.Duration(time.Millisecond) })
	l.StopAccepting()
	if err := <-l.ended; err == nil {
		t.Error("no request was cut")
	}
	l.stopped.Store(true)
	l.closed("the connection with a request", l.busy)
}
