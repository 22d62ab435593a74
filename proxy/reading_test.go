package proxy_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/quic-go/quic-go/http3"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// Limits of package downstream.
const (
	rateGrace    = 5 * time.Second // without server.min_body_rate
	unreadWait   = time.Second     // for more bytes of a body after its answer
	operatorBody = 5 * time.Second // for a body at the admin address
)

// overSockets runs f with a world on real sockets and a client of each protocol.
func overSockets(t *testing.T, o world.Setup, f func(t *testing.T, w *world.World, c *http.Client, base string)) {
	insecure := &tls.Config{InsecureSkipVerify: true}
	edit := o.Config
	for _, name := range []string{"h1", "h1 of net/http", "h2c", "tls h1", "tls h2", "h3"} {
		t.Run(name, func(t *testing.T) {
			o := o
			o.Sockets = true
			secure := !strings.HasPrefix(name, "h1") && name != "h2c"
			o.Config = func(c *config.Config) {
				edit(c)
				switch name {
				case "h1 of net/http":
					c.Server.HTTP1 = config.HTTP1NetHTTP
				case "h3":
					c.Server.HTTP3 = "127.0.0.1:0"
				}
			}
			if secure {
				var err error
				if o.Certs, err = edge.LoadCerts("server.tls", config.TLS{SelfSigned: true}, slog.New(slog.DiscardHandler)); err != nil {
					t.Fatal(err)
				}
			}
			w := newWorld(t, o)
			if name == "h3" {
				h3 := &http3.Transport{TLSClientConfig: insecure.Clone()}
				defer h3.Close()
				f(t, w, &http.Client{Transport: h3}, "https://"+w.Front.HTTP3Addr().String())
				return
			}
			tr := &http.Transport{TLSClientConfig: insecure.Clone(), Protocols: new(http.Protocols)}
			defer tr.CloseIdleConnections()
			base := "http://" + w.Front.Addr().String()
			tr.Protocols.SetHTTP1(!strings.HasSuffix(name, "h2") && name != "h2c")
			tr.Protocols.SetHTTP2(name == "tls h2")
			tr.Protocols.SetUnencryptedHTTP2(name == "h2c")
			if secure {
				base = "https://" + w.Front.Addr().String()
			}
			f(t, w, &http.Client{Transport: tr}, base)
		})
	}
}

// slowBody is a body of one byte that ends when it is closed.
type slowBody struct {
	sent bool
	over chan struct{}
	once sync.Once
}

func newSlowBody() *slowBody { return &slowBody{over: make(chan struct{})} }

func (b *slowBody) Read(p []byte) (int, error) {
	if !b.sent {
		b.sent = true
		return copy(p, "{"), nil
	}
	<-b.over
	return 0, io.EOF
}

func (b *slowBody) Close() error {
	b.once.Do(func() { close(b.over) })
	return nil
}

// announce sends a head and one byte of a body. Its channel gets the status of the
// answer.
func announce(ctx context.Context, c *http.Client, url string, status chan<- string) {
	body := newSlowBody()
	defer body.Close()
	defer context.AfterFunc(ctx, func() { body.Close() })() // the transport waits for the end of the body
	r, err := http.NewRequestWithContext(ctx, "POST", url, body)
	if err != nil {
		status <- err.Error()
		return
	}
	r.ContentLength = 1 << 20
	resp, err := c.Do(r)
	if err != nil {
		status <- err.Error()
		return
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	status <- fmt.Sprintf("%d %s", resp.StatusCode, text)
}

// A client has announced as many bodies as the proxy may read at the same time. Requests
// whose bodies have arrived are served nevertheless, over every protocol and from the
// same address.
func TestFloodOfAnnouncedBodies(t *testing.T) {
	const places = 8
	o := world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}}, Config: func(c *config.Config) {
		c.Limits.MaxExchanges, c.Limits.MaxReading, c.Limits.PerClient = 2, places, 0
	}}
	// Over HTTP/1.1 a small body that comes with its head takes no place.
	large := strings.TrimSuffix(world.Completions(false), "}") + strings.Repeat(" ", 8<<10) + "}"
	overSockets(t, o, func(t *testing.T, w *world.World, c *http.Client, base string) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		status := make(chan string, 2*places)
		var flood sync.WaitGroup
		for range places {
			flood.Go(func() { announce(ctx, c, base+world.CompletionsPath, status) })
		}
		for w.Reading() < places {
			time.Sleep(time.Millisecond)
		}
		for range 3 {
			if a := world.Ask(ctx, c, "POST", base+world.CompletionsPath, large); a.Status != 200 {
				t.Fatalf("request with a whole body: got %+v", a)
			}
			if s := <-status; !strings.HasPrefix(s, "408 ") || !strings.Contains(s, "reading_limit") {
				t.Errorf("slowest body: got %s", s)
			}
			flood.Go(func() { announce(ctx, c, base+world.CompletionsPath, status) })
			for w.Reading() < places {
				time.Sleep(time.Millisecond)
			}
		}
		if n := w.Metric("pdproxy_shed_total", "reading_limit"); n != 3 {
			t.Errorf("got %v bodies counted as shed, want 3", n)
		}
		cancel()
		flood.Wait()
		for w.Running() > 0 {
			time.Sleep(time.Millisecond)
		}
	})
}

// If a body stops, the client gets an error after the time that server.min_body_rate
// allows, over every protocol.
func TestBodyRateOverSockets(t *testing.T) {
	o := world.Setup{Config: func(c *config.Config) { c.Server.MinBodyRate = 1 << 30 }} // at once after the grace
	overSockets(t, o, func(t *testing.T, w *world.World, c *http.Client, base string) {
		status, ended := make(chan string, 1), make(chan time.Duration, 1)
		begin := time.Now()
		go func() {
			announce(t.Context(), c, base+world.CompletionsPath, status)
			ended <- time.Since(begin)
		}()
		t.Parallel() // the bodies of all protocols wait at the same time, whatever -parallel is
		s, took := <-status, <-ended
		if !strings.HasPrefix(s, "408 ") || !strings.Contains(s, "min_body_rate") {
			t.Errorf("%s", s)
		}
		if took < rateGrace {
			t.Errorf("answered after %v, during the grace period", took)
		}
		for w.Running() > 0 {
			time.Sleep(time.Millisecond)
		}
		w.Outcome(telemetry.OutcomeClientError)
	})
}

// The proxy rejects a request without reading its body. The request holds its connection
// only for a short time, even if the rest of the body never arrives.
func TestRefusedUnread(t *testing.T) {
	tests := []struct {
		name, method, path string
		length             int64
		status             int
	}{
		{"not found", "POST", "/nothing", 1000, 404},
		{"wrong method", "PUT", world.CompletionsPath, 1000, 405},
		{"of a list", "GET", "/v1/models", 1000, 401},
		{"no key", "POST", world.CompletionsPath, 1000, 401},
		{"no key, long", "POST", world.CompletionsPath, 1 << 30, 401},
		{"too large", "POST", world.CompletionsPath, 1 << 30, 413},
		{"coded", "POST", world.CompletionsPath, 1000, 415},
	}
	for _, tt := range tests {
		world.Run(t, tt.name, func(t *testing.T) {
			w := newWorld(t, world.Setup{Keys: world.KeyLine("team", "good")})
			conn, err := w.Public.Dial()
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			key := ""
			if tt.status == 413 || tt.status == 415 {
				key = "Authorization: Bearer good\r\n"
			}
			fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nHost: proxy\r\n%sContent-Encoding: br\r\nContent-Length: %d\r\n\r\n{", tt.method, tt.path, key, tt.length)
			begin := time.Now()
			text, _ := io.ReadAll(conn) // until the proxy closes the connection
			if took := time.Since(begin); took > 2*time.Second || !strings.HasPrefix(string(text), fmt.Sprintf("HTTP/1.1 %d ", tt.status)) {
				t.Errorf("after %v: %q", took, text)
			}
		})
	}
}

// TestAnswerIsReadBehindTheBody: a client that sends a whole body before it reads gets
// the answer, for any size of the body. The connection can serve another request.
func TestAnswerIsReadBehindTheBody(t *testing.T) {
	for _, chunked := range []bool{false, true} {
		t.Run(fmt.Sprintf("chunked %v", chunked), func(t *testing.T) {
			w := newWorld(t, world.Setup{Sockets: true, Config: func(c *config.Config) { c.Server.MaxBody = 1 << 20 }})
			conn, err := net.Dial("tcp", w.Front.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			answers := bufio.NewReader(conn)
			const pieces, size = 40, 1 << 20
			head, piece, end := fmt.Sprintf("Content-Length: %d", pieces*size), strings.Repeat("a", size), ""
			if chunked {
				head, piece, end = "Transfer-Encoding: chunked", fmt.Sprintf("%x\r\n%s\r\n", size, piece), "0\r\n\r\n"
			}
			for range 2 {
				fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: proxy\r\n%s\r\n\r\n", world.CompletionsPath, head)
				for range pieces {
					if _, err := io.WriteString(conn, piece); err != nil {
						t.Fatal(err)
					}
				}
				io.WriteString(conn, end)
				resp, err := http.ReadResponse(answers, nil)
				if err != nil || resp.StatusCode != 413 {
					t.Fatalf("%+v, %v", resp, err)
				}
				if _, err := io.Copy(io.Discard, resp.Body); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestRestOfABodyIsNoRequest: the proxy closes the connection of a client that stops
// sending a body after the answer.
func TestRestOfABodyIsNoRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, world.Setup{})
		conn, err := w.Public.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		go func() {
			fmt.Fprintf(conn, "POST /nothing HTTP/1.1\r\nHost: proxy\r\nContent-Length: 1000\r\n\r\n")
			time.Sleep(2 * unreadWait)
			io.WriteString(conn, "GET /version HTTP/1.1\r\nHost: proxy\r\n\r\n")
		}()
		text, _ := io.ReadAll(conn)
		time.Sleep(2 * unreadWait) // for the second request
		if strings.Count(string(text), "HTTP/1.1 ") != 1 || !strings.HasPrefix(string(text), "HTTP/1.1 404 ") {
			t.Errorf("%q", text)
		}
	})
}
