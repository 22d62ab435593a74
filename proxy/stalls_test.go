package proxy_test

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

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
