package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"

	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// overTCP are the protocols of the TCP listener.
var overTCP = []struct {
	name   string
	tls    bool
	choose func(*http.Protocols)
	proto  string
}{
	{"h1", false, func(p *http.Protocols) { p.SetHTTP1(true) }, "HTTP/1.1"},
	{"h2c", false, func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) }, "HTTP/2.0"},
	{"tls h1", true, func(p *http.Protocols) { p.SetHTTP1(true) }, "HTTP/1.1"},
	{"tls h2", true, func(p *http.Protocols) { p.SetHTTP2(true) }, "HTTP/2.0"},
}

// eachProtocol runs f in a synctest bubble for each protocol. open makes the world and
// the client of the protocol.
func eachProtocol(t *testing.T, f func(t *testing.T, proto string, open func(setup) (*world, *http.Client))) {
	for _, p := range overTCP {
		t.Run(p.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f(t, p.proto, func(o setup) (*world, *http.Client) {
					scheme := "http"
					if p.tls {
						scheme = "https"
						var err error
						if o.certs, err = edge.LoadCerts("server.tls", config.TLS{SelfSigned: true}, slog.New(slog.DiscardHandler)); err != nil {
							t.Fatal(err)
						}
					}
					w := newWorld(t, o)
					var protocols http.Protocols
					p.choose(&protocols)
					tr := w.transport(&protocols, &tls.Config{InsecureSkipVerify: true})
					if p.tls {
						tr.DialContext = w.dialBuffered
					}
					w.client = &http.Client{Transport: withScheme{scheme, tr}}
					return w, w.client
				})
			})
		})
	}
}

// withScheme sends every request with a scheme.
type withScheme struct {
	scheme string
	*http.Transport
}

func (s withScheme) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.URL.Scheme = s.scheme
	return s.Transport.RoundTrip(r)
}

// dialBuffered is dialPublic for TLS. Both ends of TLS write a last record at the same
// time. On a plain pipe each would wait until the other reads.
func (w *world) dialBuffered(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := w.dialPublic(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	h := &bufferedConn{Conn: c, out: make(chan []byte, 64), gone: make(chan struct{})}
	go h.run()
	return h, nil
}

// bufferedConn is the end of a pipe whose writes do not wait for a reader, like the
// writes of a socket.
type bufferedConn struct {
	net.Conn
	out  chan []byte
	gone chan struct{}
	once sync.Once
}

func (c *bufferedConn) run() {
	for {
		select {
		case b := <-c.out:
			c.Conn.Write(b)
		case <-c.gone:
			return
		}
	}
}

// Write implements net.Conn.
func (c *bufferedConn) Write(p []byte) (int, error) {
	select {
	case c.out <- bytes.Clone(p):
		return len(p), nil
	case <-c.gone:
		return 0, net.ErrClosed
	}
}

// Close implements net.Conn.
func (c *bufferedConn) Close() error {
	c.once.Do(func() { close(c.gone) })
	return c.Conn.Close()
}

func open(t *testing.T, ctx context.Context, c *http.Client, body string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, "POST", "http://proxy"+completionsPath, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

// All protocols use the same handler.
func TestFrontProtocols(t *testing.T) {
	eachProtocol(t, func(t *testing.T, proto string, start func(setup) (*world, *http.Client)) {
		w, c := start(setup{engines: []*fakeEngine{{serve: func(c *engineConn, nth int) {
			if nth == 1 {
				c.stream(eventA, done)
				return
			}
			c.json(200, unary)
		}}}})
		resp := open(t, t.Context(), c, completions(true))
		body, err := io.ReadAll(resp.Body)
		if err != nil || string(body) != eventA+done || resp.Proto != proto || resp.Header.Get("Alt-Svc") != "" {
			t.Errorf("%s, %v: %q", resp.Proto, err, body)
		}
		if a := w.post(completionsPath, completions(false)); a.status != 200 || a.body != unary {
			t.Errorf("%+v", a)
		}
		for path, want := range map[string]int{"/health": 200, "/nothing": 404} {
			if a := w.get(path); a.status != want || a.header.Get("X-Request-Id") == "" {
				t.Errorf("%s: %+v", path, a)
			}
		}
	})
}

// If the client closes its connection, the legs end at once, over each protocol.
func TestHangUp(t *testing.T) {
	eachProtocol(t, func(t *testing.T, _ string, start func(setup) (*world, *http.Client)) {
		for _, stream := range []bool{false, true} {
			e := &fakeEngine{serve: func(c *engineConn, _ int) {
				if stream {
					c.send(streamHead)
					c.chunks(eventA)
				}
				c.hold()
			}}
			w, c := start(setup{engines: []*fakeEngine{e}})
			ctx, leave := context.WithCancel(t.Context())
			got := make(chan error, 1)
			go func() { got <- ask(ctx, c, "POST", "http://proxy"+completionsPath, completions(stream)).err }()
			synctest.Wait()
			begin := time.Now()
			leave()
			if <-got == nil {
				t.Error("the client received a complete answer")
			}
			e.wg.Wait()
			synctest.Wait()
			if d := time.Since(begin); d != 0 {
				t.Errorf("the leg ended %v later, want at once", d)
			}
			w.outcome(telemetry.OutcomeCancelled)
		}
	})
}

// During a drain, running requests continue until the limit, and the proxy accepts no
// connection.
func TestDrain(t *testing.T) {
	eachProtocol(t, func(t *testing.T, _ string, start func(setup) (*world, *http.Client)) {
		end := make(chan struct{})
		w, c := start(setup{engines: []*fakeEngine{{serve: func(c *engineConn, _ int) {
			c.send(streamHead)
			c.chunks(eventA)
			<-end
			c.chunks(eventB, done)
			c.send("0\r\n\r\n")
		}}}})
		resp := open(t, t.Context(), c, completions(true))
		stopped := make(chan error, 1)
		time.AfterFunc(20*time.Second, func() { close(end) }) // of 30 s
		go func() { w.end(); stopped <- <-w.ended }()
		w.stopped.Store(true)
		synctest.Wait()
		if _, err := w.public.Dial(); err == nil {
			t.Error("the proxy accepts a new connection")
		}
		if a := w.operate("GET", "/readyz", ""); a.status != 503 {
			t.Errorf("readyz: %d", a.status)
		}
		if a := w.operate("GET", "/healthz", ""); a.status != 200 {
			t.Errorf("healthz: %d", a.status)
		}
		w.ops.CloseIdleConnections()
		body, err := io.ReadAll(resp.Body)
		if err != nil || string(body) != eventA+eventB+done {
			t.Errorf("%v: %q", err, body)
		}
		c.CloseIdleConnections()
		if err := <-stopped; err != nil {
			t.Errorf("got %v, want a drain without cut exchanges", err)
		}
		w.outcome(telemetry.OutcomeOK)
	})
}

// At the drain's limit the proxy sends an error to the remaining clients and aborts their
// requests.
func TestDrainCuts(t *testing.T) {
	eachProtocol(t, func(t *testing.T, _ string, start func(setup) (*world, *http.Client)) {
		w, c := start(setup{engines: []*fakeEngine{{serve: func(c *engineConn, nth int) {
			if nth == 1 {
				c.send(streamHead)
				c.chunks(eventA)
			}
			c.hold()
		}}}, config: func(c *config.Config) { c.Limits.MaxExchanges = 2 }})
		resp := open(t, t.Context(), c, completions(true))
		var wg sync.WaitGroup
		var answers [2]answer // one request waits for its leg, one for a place in the queue
		for i := range answers {
			wg.Go(func() { answers[i] = w.post(completionsPath, completions(false)) })
			synctest.Wait()
		}
		w.stopped.Store(true)
		w.end()
		begin := time.Now()
		body, err := io.ReadAll(resp.Body)
		const told = `data: {"error":{"message":"the proxy is shutting down","type":"overloaded_error","param":null,"code":"draining"}}` + "\n\n"
		if string(body) != eventA+told || err != nil {
			t.Errorf("%v: %q", err, body)
		}
		wg.Wait()
		if d := time.Since(begin); d != 30*time.Second {
			t.Errorf("aborted after %v, want the drain's limit", d)
		}
		for i, code := range []string{"draining", "queue_timeout"} {
			if a := answers[i]; a.status != 503 || !strings.Contains(a.body, code) {
				t.Errorf("answer %d: %+v", i, a)
			}
		}
		c.CloseIdleConnections()
		w.ops.CloseIdleConnections()
		if err := <-w.ended; err == nil || err.Error() != "drain: 2 exchanges were cut after 30s" {
			t.Errorf("drain: %v", err)
		}
	})
}

// http2Begin is the first message of an HTTP/2 client: the preface and its settings.
const http2Begin = http2.ClientPreface + "\x00\x00\x00\x04\x00\x00\x00\x00\x00"

// The proxy closes the connection of a client that sends its head, its handshake or its
// next request too slowly. Such a client does not delay a drain.
func TestSlowClients(t *testing.T) {
	const limit = 10 * time.Second
	tests := []struct {
		name  string
		tls   bool
		sent  string
		after time.Duration
	}{
		{"nothing", false, "", limit},
		{"half a head", false, "POST / HTTP/1.1\r\nHost: a\r\nX-", limit},
		{"half a preface", false, "PRI * HTTP/2.0\r\n", limit},
		{"only a preface", false, http2.ClientPreface, 2 * time.Second},
		{"half a frame", false, http2Begin + "\x00\x00\x08\x06\x00\x00\x00\x00\x00ping", limit},
		{"part of a frame header", false, http2Begin + "\x00\x00\x08", limit},
		{"part of a header block, h2c", false, http2Begin + "\x00\x00\x60\x01\x04\x00\x00\x00\x01\x82", limit},
		{"endless header block, h2c", false, http2Begin + "\x00\x00\x01\x01\x00\x00\x00\x00\x01\x82", limit},
		{"no handshake", true, "", limit},
		{"half a handshake", true, "\x16\x03\x01\x02\x00", limit},
		{"no next request", false, "GET /version HTTP/1.1\r\nHost: a\r\n\r\n", 120 * time.Second},
	}
	for _, tt := range tests {
		for _, drain := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, drain %v", tt.name, drain), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					o := setup{}
					if tt.tls {
						var err error
						if o.certs, err = edge.LoadCerts("server.tls", config.TLS{SelfSigned: true}, slog.New(slog.DiscardHandler)); err != nil {
							t.Fatal(err)
						}
					}
					w := newWorld(t, o)
					conn, err := w.public.Dial()
					if err != nil {
						t.Fatal(err)
					}
					defer conn.Close()
					begin := time.Now()
					gone := make(chan time.Duration, 1)
					go func() {
						io.Copy(io.Discard, conn)
						gone <- time.Since(begin)
					}()
					io.WriteString(conn, tt.sent)
					synctest.Wait()
					if drain {
						if err := w.stop(); err != nil {
							t.Errorf("got %v, want a drain without cut exchanges", err)
						}
						if d := <-gone; d > limit {
							t.Errorf("the drain took too long: %v", d)
						}
						if d := time.Since(begin); tt.tls && d > time.Second {
							t.Errorf("the drain took %v with an incomplete handshake", d)
						}
						return
					}
					if d := <-gone; d < tt.after || d > tt.after+2*time.Second {
						t.Errorf("connection closed after %v, want %v", d, tt.after)
					}
				})
			})
		}
	}
}

func TestHeadLimit(t *testing.T) {
	eachProtocol(t, func(t *testing.T, _ string, start func(setup) (*world, *http.Client)) {
		w, c := start(setup{config: func(c *config.Config) { c.Server.MaxHeader = 8 << 10 }})
		if a := ask(t.Context(), c, "GET", "http://proxy/version", "", "X-A", strings.Repeat("a", 4<<10)); a.status != 200 {
			t.Errorf("head below the limit: got %+v", a)
		}
		a := ask(t.Context(), c, "GET", "http://proxy/version", "", "X-A", strings.Repeat("a", 20<<10))
		if a.status != 431 || a.header.Get("Content-Type") != "application/json" || a.header.Get("X-Request-Id") == "" ||
			!strings.Contains(a.body, `"code":"head_too_large"`) || a.header.Get("Content-Length") != strconv.Itoa(len(a.body)) {
			t.Errorf("head above the limit: got %+v", a)
		}
		if strings.Contains(w.logged.String(), "panic") {
			t.Error(w.logged)
		}
	})
}

func TestBodyLimit(t *testing.T) {
	eachProtocol(t, func(t *testing.T, _ string, start func(setup) (*world, *http.Client)) {
		_, c := start(setup{config: func(c *config.Config) { c.Server.MaxBody = 1000 }})
		for _, sized := range []bool{true, false} {
			var body io.Reader = strings.NewReader(strings.Repeat("x", 2000))
			if !sized {
				body = io.MultiReader(body)
			}
			resp, err := c.Post("http://proxy"+completionsPath, "application/json", body)
			if err != nil {
				t.Fatal(err)
			}
			text, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != 413 || !strings.Contains(string(text), "1000 bytes") {
				t.Errorf("announced length %v: got status %d: %s", sized, resp.StatusCode, text)
			}
		}
	})
}

// If the rest of a body does not arrive, the client gets an error, over each protocol.
func TestBodyTimeout(t *testing.T) {
	eachProtocol(t, func(t *testing.T, _ string, start func(setup) (*world, *http.Client)) {
		w, c := start(setup{config: func(c *config.Config) { c.Server.MinBodyRate = 0 }})
		r, stop := io.Pipe()
		defer stop.Close()
		go stop.Write([]byte(`{"model":`))
		begin := time.Now()
		resp, err := c.Post("http://proxy"+completionsPath, "application/json", r)
		if err != nil {
			t.Fatalf("after %v: %v", time.Since(begin), err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != 408 || !strings.Contains(string(text), "body_timeout") || time.Since(begin) < 60*time.Second {
			t.Errorf("got status %d after %v: %s", resp.StatusCode, time.Since(begin), text)
		}
		synctest.Wait()
		w.outcome(telemetry.OutcomeClientError)
	})
}

// Two requests on one connection. In the second, the client requests that the proxy close the
// connection after the answer.
func TestKeepAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{engines: []*fakeEngine{{serve: func(c *engineConn, _ int) { c.json(200, unary) }}}})
		conn, err := w.public.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		br := bufio.NewReader(conn)
		for _, header := range []string{"", "", "Connection: close\r\n"} {
			body := completions(false)
			fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: proxy\r\n%sContent-Length: %d\r\n\r\n%s", completionsPath, header, len(body), body)
			resp, err := http.ReadResponse(br, nil)
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(resp.Body)
			if err != nil || string(text) != unary || resp.Close != (header != "") {
				t.Errorf("%v, close %v: %s", err, resp.Close, text)
			}
		}
		if _, err := br.ReadByte(); err != io.EOF {
			t.Errorf("the connection is open after the last answer: %v", err)
		}
	})
}

func TestListenErrors(t *testing.T) {
	w := newWorld(t, setup{sockets: true})
	taken, udp := w.front.Addr().String(), ""
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	udp = pc.LocalAddr().String()
	certs, err := edge.LoadCerts("server.tls", config.TLS{SelfSigned: true}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name, want string
		set        func(*config.Config)
	}{
		{"public address taken", "server.listen: ", func(c *config.Config) { c.Server.Listen = taken }},
		{"admin address taken", "admin.listen: ", func(c *config.Config) { c.Admin.Listen = taken }},
		{"UDP address taken", "server.http3: ", func(c *config.Config) { c.Server.HTTP3 = udp }},
		{"no UDP address", "server.http3: ", func(c *config.Config) { c.Server.HTTP3 = "nowhere:port" }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := config.Default()
			cfg.Server.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
			tt.set(&cfg)
			if _, err := w.Listen(&cfg, certs, admin.Token{Text: adminToken}, edge.Sockets{}); err == nil || !strings.HasPrefix(err.Error(), tt.want) {
				t.Errorf("got error %v, want an error that begins with %q", err, tt.want)
			}
		})
	}
}

// If a listener fails, Serve returns the error of the listener.
func TestServeEndsWithItsListener(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{})
		w.stopped.Store(true)
		w.public.Close()
		if err := <-w.ended; err == nil {
			t.Error("Serve ended well")
		}
	})
}
