package proxy_test

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// At max_connections the proxy closes an idle connection to serve a new client. If no
// connection is idle, the new client gets an error. Operators can always connect.
func TestMaxConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answer := make(chan struct{})
		e := &world.Engine{Serve: func(c *world.Conn, _ int) {
			<-answer
			c.JSON(200, `{"id":"1","choices":[{"text":"x","finish_reason":"stop"}]}`)
		}}
		w := newWorld(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) { c.Limits.MaxConnections = 2 }})
		dial := func() net.Conn {
			c, err := w.Public.Dial()
			if err != nil {
				t.Fatal(err)
			}
			return c
		}
		read := func(c net.Conn) chan string {
			got := make(chan string, 1)
			go func() {
				b, _ := io.ReadAll(c)
				got <- string(b)
			}()
			return got
		}
		idle, busy := dial(), dial()
		idleEnd := read(idle)
		world.WriteRequest(t, busy, world.Completions(false))
		synctest.Wait()

		second := dial()
		world.WriteRequest(t, second, world.Completions(false))
		if got := <-idleEnd; got != "" {
			t.Errorf("the idle connection received %q", got)
		}
		synctest.Wait()
		refused := read(dial())
		resp, err := http.ReadResponse(bufio.NewReader(strings.NewReader(<-refused)), nil)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != 503 || !resp.Close || resp.Header.Get("Retry-After") == "" || !json.Valid(body) {
			t.Errorf("refused client: got %+v, %s, %v", resp, body, err)
		}
		w.Prometheus.MustRegister(w.Front)
		for _, tt := range []struct {
			name, label string
			want        float64
		}{
			{"pdproxy_connections_open", "tcp", 2},
			{"pdproxy_connections_open", "quic", 0},
			{"pdproxy_connections_evicted_total", "", 1},
			{"pdproxy_connections_refused_total", "max_connections", 1},
			{"pdproxy_connections_refused_total", "max_connections_per_address", 0},
		} {
			if got := w.Metric(tt.name, strings.Fields(tt.label)...); got != tt.want {
				t.Errorf("%s %s: got %v, want %v", tt.name, tt.label, got, tt.want)
			}
		}
		if a := w.Operate("GET", "/readyz", ""); a.Status != 200 {
			t.Errorf("operator: got %+v", a)
		}
		close(answer)
		for _, c := range []net.Conn{busy, second} {
			if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || resp.StatusCode != 200 {
				t.Errorf("busy client: got %+v, %v", resp, err)
			}
			c.Close()
		}
	})
}

// A request with both framings reaches no handler. This test uses a real socket.
func TestFramingOverSocket(t *testing.T) {
	w := newWorld(t, world.Setup{Sockets: true})
	for _, cut := range []int{0, 30, 60, 80} {
		conn, err := w.DialPublic(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		body := world.Completions(false)
		req := fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", len(body), len(body), body)
		io.WriteString(conn, req[:cut])
		io.WriteString(conn, req[cut:])
		answer, err := io.ReadAll(conn)
		conn.Close()
		if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 400 Bad Request\r\n") {
			t.Errorf("split at %d: got %q, %v", cut, answer, err)
		}
	}
	if n := len(w.Ended()); n != 0 {
		t.Errorf("got %d exchanges, want none", n)
	}
}

// The proxy closes the connection of an HTTP/1.1 client that does not read its answer,
// after write_timeout. This holds for every answer, on both addresses.
func TestUnreadAnswers(t *testing.T) {
	const limit = 10 * time.Second
	for _, tt := range []struct {
		name, request string
		admin, tls    bool
	}{
		{"models", "GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", false, false},
		{"models over TLS", "GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", false, true},
		{"health", "GET /health HTTP/1.1\r\nHost: a\r\n\r\n", false, false},
		{"not found", "GET /nothing HTTP/1.1\r\nHost: a\r\n\r\n", false, false},
		{"wrong method", "GET /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n", false, false},
		{"bad request", "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1, 2\r\n\r\n", false, false},
		{"refused body", "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{]", false, false},
		{"operators", "GET /v1/engines HTTP/1.1\r\nHost: a\r\n\r\n", true, false},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			o := world.Setup{Config: func(c *config.Config) { c.Server.WriteTimeout = config.Duration(limit) }}
			if tt.tls {
				var err error
				if o.Certs, err = edge.LoadCerts("server.tls", config.TLS{SelfSigned: true}, slog.New(slog.DiscardHandler)); err != nil {
					t.Fatal(err)
				}
			}
			w := newWorld(t, o)
			dial := w.Public.Dial
			if tt.admin {
				dial = w.Admin.Dial
			}
			pipe, err := dial()
			if err != nil {
				t.Fatal(err)
			}
			defer pipe.Close()
			c := pipe
			if tt.tls {
				c = tls.Client(pipe, &tls.Config{InsecureSkipVerify: true})
			}
			io.WriteString(c, tt.request)
			time.Sleep(limit)
			synctest.Wait()
			if hungUp(pipe) {
				t.Error("the proxy closed the connection before the limit")
			}
			time.Sleep(2 * time.Second)
			synctest.Wait()
			if !hungUp(pipe) {
				t.Error("the proxy did not close the connection at the limit")
			}
		})
	}
}

// hungUp reports whether the other end of a pipe is closed.
func hungUp(c net.Conn) bool {
	c.SetWriteDeadline(time.Unix(1, 0))
	_, err := c.Write([]byte{0})
	return errors.Is(err, io.ErrClosedPipe)
}

// The proxy resets the streams of an HTTP/2 client that never opens its window. The
// connection stays open.
func TestUnreadStreams(t *testing.T) {
	for _, path := range []string{"/v1/models", "/health", "/nothing", "/v1/completions"} {
		world.Run(t, path, func(t *testing.T) {
			const limit = 10 * time.Second
			w := newWorld(t, world.Setup{Config: func(c *config.Config) { c.Server.WriteTimeout = config.Duration(limit) }})
			c, err := w.Public.Dial()
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			frames := http2.NewFramer(c, c)
			reset := make(chan time.Duration, 1)
			begun := time.Now()
			go func() {
				for {
					f, err := frames.ReadFrame()
					if err != nil {
						return
					}
					if f.Header().Type == http2.FrameRSTStream {
						reset <- time.Since(begun)
					}
				}
			}()
			io.WriteString(c, http2.ClientPreface)
			frames.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
			var head bytes.Buffer
			fields := hpack.NewEncoder(&head)
			for _, f := range [][2]string{{":method", "GET"}, {":scheme", "http"}, {":path", path}, {":authority", "a"}} {
				fields.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
			}
			frames.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: head.Bytes(), EndHeaders: true, EndStream: true})
			if d := <-reset; d < limit || d > limit+time.Second {
				t.Errorf("reset after %v", d)
			}
		})
	}
}

// A slowly read answer leaves no deadline behind for the next answer on its connection.
func TestWriteLimitIsOfOneAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.Stream(world.EventA, world.Done) }}
		w := newWorld(t, world.Setup{Engines: []*world.Engine{e}})
		w.Post(world.CompletionsPath, world.Completions(true))
		time.Sleep(100 * time.Second) // longer than any limit of a write, shorter than idle_timeout
		if a := w.Get("/version"); a.Status != 200 || a.Err != nil {
			t.Errorf("got %+v", a)
		}
		w.Prometheus.MustRegister(w.Front)
		if n := w.Metric("pdproxy_connections_open", "tcp"); n != 1 {
			t.Errorf("got %v open connections, want both requests on one connection", n)
		}
	})
}
