package proxy_test

import (
	"bufio"
	"context"
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
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// All protocols use the same handler.
func TestFrontProtocols(t *testing.T) {
	eachProtocol(t, func(t *testing.T, proto string, start func(world.Setup) (*world.World, *http.Client)) {
		w, c := start(world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, nth int) {
			if nth == 1 {
				c.Stream(world.EventA, world.Done)
				return
			}
			c.JSON(200, world.Unary)
		}}}})
		resp := world.Open(t, t.Context(), c, world.Completions(true))
		body, err := io.ReadAll(resp.Body)
		if err != nil || string(body) != world.EventA+world.Done || resp.Proto != proto || resp.Header.Get("Alt-Svc") != "" {
			t.Errorf("%s, %v: %q", resp.Proto, err, body)
		}
		if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 || a.Body != world.Unary {
			t.Errorf("%+v", a)
		}
		for path, want := range map[string]int{"/health": 200, "/nothing": 404} {
			if a := w.Get(path); a.Status != want || a.Header.Get("X-Request-Id") == "" {
				t.Errorf("%s: %+v", path, a)
			}
		}
	})
}

// If the client closes its connection, the legs end at once, over each protocol.
func TestHangUp(t *testing.T) {
	eachProtocol(t, func(t *testing.T, _ string, start func(world.Setup) (*world.World, *http.Client)) {
		for _, stream := range []bool{false, true} {
			e := &world.Engine{Serve: func(c *world.Conn, _ int) {
				if stream {
					c.Send(world.StreamHead)
					c.Chunks(world.EventA)
				}
				c.Hold()
			}}
			w, c := start(world.Setup{Engines: []*world.Engine{e}})
			ctx, leave := context.WithCancel(t.Context())
			got := make(chan error, 1)
			go func() {
				got <- world.Ask(ctx, c, "POST", "http://proxy"+world.CompletionsPath, world.Completions(stream)).Err
			}()
			synctest.Wait()
			begin := time.Now()
			leave()
			if <-got == nil {
				t.Error("the client received a complete answer")
			}
			e.Wait()
			synctest.Wait()
			if d := time.Since(begin); d != 0 {
				t.Errorf("the leg ended %v later, want at once", d)
			}
			w.Outcome(telemetry.OutcomeCancelled)
		}
	})
}

// During a drain, running requests continue until the limit, and the proxy accepts no
// connection.
func TestDrain(t *testing.T) {
	eachProtocol(t, func(t *testing.T, _ string, start func(world.Setup) (*world.World, *http.Client)) {
		end := make(chan struct{})
		w, c := start(world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			c.Chunks(world.EventA)
			<-end
			c.Chunks(world.EventB, world.Done)
			c.Send("0\r\n\r\n")
		}}}})
		resp := world.Open(t, t.Context(), c, world.Completions(true))
		stopped := make(chan error, 1)
		time.AfterFunc(20*time.Second, func() { close(end) }) // of 30 s
		go func() { w.End(); stopped <- <-w.Over }()
		w.Stopped.Store(true)
		synctest.Wait()
		if _, err := w.Public.Dial(); err == nil {
			t.Error("the proxy accepts a new connection")
		}
		if a := w.Operate("GET", "/readyz", ""); a.Status != 503 {
			t.Errorf("readyz: %d", a.Status)
		}
		if a := w.Operate("GET", "/healthz", ""); a.Status != 200 {
			t.Errorf("healthz: %d", a.Status)
		}
		w.AdminClient.CloseIdleConnections()
		body, err := io.ReadAll(resp.Body)
		if err != nil || string(body) != world.EventA+world.EventB+world.Done {
			t.Errorf("%v: %q", err, body)
		}
		c.CloseIdleConnections()
		if err := <-stopped; err != nil {
			t.Errorf("got %v, want a drain without cut exchanges", err)
		}
		w.Outcome(telemetry.OutcomeOK)
	})
}

// At the drain's limit the proxy sends an error to the remaining clients and aborts their
// requests.
func TestDrainCuts(t *testing.T) {
	eachProtocol(t, func(t *testing.T, _ string, start func(world.Setup) (*world.World, *http.Client)) {
		w, c := start(world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, nth int) {
			if nth == 1 {
				c.Send(world.StreamHead)
				c.Chunks(world.EventA)
			}
			c.Hold()
		}}}, Config: func(c *config.Config) { c.Limits.MaxExchanges = 2 }})
		resp := world.Open(t, t.Context(), c, world.Completions(true))
		var wg sync.WaitGroup
		var answers [2]world.Answer // one request waits for its leg, one for a place in the queue
		for i := range answers {
			wg.Go(func() { answers[i] = w.Post(world.CompletionsPath, world.Completions(false)) })
			synctest.Wait()
		}
		w.Stopped.Store(true)
		w.End()
		begin := time.Now()
		body, err := io.ReadAll(resp.Body)
		const told = `data: {"error":{"message":"the proxy is shutting down","type":"overloaded_error","param":null,"code":"draining"}}` + "\n\n"
		if string(body) != world.EventA+told || err != nil {
			t.Errorf("%v: %q", err, body)
		}
		wg.Wait()
		if d := time.Since(begin); d != 30*time.Second {
			t.Errorf("aborted after %v, want the drain's limit", d)
		}
		for i, code := range []string{"draining", "queue_timeout"} {
			if a := answers[i]; a.Status != 503 || !strings.Contains(a.Body, code) {
				t.Errorf("answer %d: %+v", i, a)
			}
		}
		c.CloseIdleConnections()
		w.AdminClient.CloseIdleConnections()
		if err := <-w.Over; err == nil || err.Error() != "drain: 2 exchanges were cut after 30s" {
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
			world.Run(t, fmt.Sprintf("%s, drain %v", tt.name, drain), func(t *testing.T) {
				o := world.Setup{}
				if tt.tls {
					var err error
					if o.Certs, err = edge.LoadCerts("server.tls", config.TLS{SelfSigned: true}, slog.New(slog.DiscardHandler)); err != nil {
						t.Fatal(err)
					}
				}
				w := newWorld(t, o)
				conn, err := w.Public.Dial()
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
					if err := w.Stop(); err != nil {
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
		}
	}
}

func TestHeadLimit(t *testing.T) {
	eachProtocol(t, func(t *testing.T, _ string, start func(world.Setup) (*world.World, *http.Client)) {
		w, c := start(world.Setup{Config: func(c *config.Config) { c.Server.MaxHeader = 8 << 10 }})
		if a := world.Ask(t.Context(), c, "GET", "http://proxy/version", "", "X-A", strings.Repeat("a", 4<<10)); a.Status != 200 {
			t.Errorf("head below the limit: got %+v", a)
		}
		a := world.Ask(t.Context(), c, "GET", "http://proxy/version", "", "X-A", strings.Repeat("a", 20<<10))
		if a.Status != 431 || a.Header.Get("Content-Type") != "application/json" || a.Header.Get("X-Request-Id") == "" ||
			!strings.Contains(a.Body, `"code":"head_too_large"`) || a.Header.Get("Content-Length") != strconv.Itoa(len(a.Body)) {
			t.Errorf("head above the limit: got %+v", a)
		}
		if strings.Contains(w.Logged.String(), "panic") {
			t.Error(w.Logged)
		}
	})
}

func TestBodyLimit(t *testing.T) {
	eachProtocol(t, func(t *testing.T, _ string, start func(world.Setup) (*world.World, *http.Client)) {
		_, c := start(world.Setup{Config: func(c *config.Config) { c.Server.MaxBody = 1000 }})
		for _, sized := range []bool{true, false} {
			var body io.Reader = strings.NewReader(strings.Repeat("x", 2000))
			if !sized {
				body = io.MultiReader(body)
			}
			resp, err := c.Post("http://proxy"+world.CompletionsPath, "application/json", body)
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
	eachProtocol(t, func(t *testing.T, _ string, start func(world.Setup) (*world.World, *http.Client)) {
		w, c := start(world.Setup{Config: func(c *config.Config) { c.Server.MinBodyRate = 0 }})
		r, stop := io.Pipe()
		defer stop.Close()
		go stop.Write([]byte(`{"model":`))
		begin := time.Now()
		resp, err := c.Post("http://proxy"+world.CompletionsPath, "application/json", r)
		if err != nil {
			t.Fatalf("after %v: %v", time.Since(begin), err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != 408 || !strings.Contains(string(text), "body_timeout") || time.Since(begin) < 60*time.Second {
			t.Errorf("got status %d after %v: %s", resp.StatusCode, time.Since(begin), text)
		}
		synctest.Wait()
		w.Outcome(telemetry.OutcomeClientError)
	})
}

// Two requests on one connection. In the second, the client requests that the proxy close the
// connection after the answer.
func TestKeepAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}}})
		conn, err := w.Public.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		br := bufio.NewReader(conn)
		for _, header := range []string{"", "", "Connection: close\r\n"} {
			body := world.Completions(false)
			fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: proxy\r\n%sContent-Length: %d\r\n\r\n%s", world.CompletionsPath, header, len(body), body)
			resp, err := http.ReadResponse(br, nil)
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(resp.Body)
			if err != nil || string(text) != world.Unary || resp.Close != (header != "") {
				t.Errorf("%v, close %v: %s", err, resp.Close, text)
			}
		}
		if _, err := br.ReadByte(); err != io.EOF {
			t.Errorf("the connection is open after the last answer: %v", err)
		}
	})
}

func TestListenErrors(t *testing.T) {
	w := newWorld(t, world.Setup{Sockets: true})
	taken, udp := w.Front.Addr().String(), ""
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
			if _, err := w.Listen(&cfg, certs, admin.Token{Text: world.AdminToken}, edge.Sockets{}); err == nil || !strings.HasPrefix(err.Error(), tt.want) {
				t.Errorf("got error %v, want an error that begins with %q", err, tt.want)
			}
		})
	}
}

// If a listener fails, Serve returns the error of the listener.
func TestServeEndsWithItsListener(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, world.Setup{})
		w.Stopped.Store(true)
		w.Public.Close()
		if err := <-w.Over; err == nil {
			t.Error("Serve ended well")
		}
	})
}
