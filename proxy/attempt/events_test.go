package attempt_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// streamBytes sends two requests for streams, one after the other, on one connection. It
// returns the bytes of both answers.
func streamBytes(t *testing.T, w *world.World, proto string) string {
	t.Helper()
	c, err := w.DialPublic(t.Context(), "", "")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	br := bufio.NewReader(c)
	var all strings.Builder
	for range 2 {
		body := world.Completions(true)
		fmt.Fprintf(c, "POST %s %s\r\nHost: proxy\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n%s", world.CompletionsPath, proto, len(body), body)
		resp, err := http.ReadResponse(br, &http.Request{Method: "POST"})
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&all, "%v %s|", resp.TransferEncoding, text)
		if resp.Close {
			break
		}
	}
	return all.String()
}

// An answer consists of chunks that net/http writes and of chunks that the proxy writes
// directly. Together they are one valid body, wherever the pieces end, and the connection
// serves the next request.
func TestEventsPastNetHTTP(t *testing.T) {
	const whole = world.EventA + world.EventB + world.EventA + world.Done
	wrap := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { next.ServeHTTP(wrappedWriter{w}, r) })
	}
	tests := []struct {
		name, proto, want string
		wrap              func(http.Handler) http.Handler
	}{
		{"HTTP/1.1", "HTTP/1.1", "[chunked] " + whole + "|[chunked] " + whole + "|", nil},
		{"a filter's writer", "HTTP/1.1", "[chunked] " + whole + "|[chunked] " + whole + "|", wrap},
		{"HTTP/1.0", "HTTP/1.0", "[] " + whole + "|", nil},
	}
	for _, tt := range tests {
		for cut := 1; cut < len(whole); cut += 7 {
			world.Run(t, fmt.Sprint(tt.name, " ", cut), func(t *testing.T) {
				e := &world.Engine{Serve: func(c *world.Conn, _ int) {
					c.Send(world.StreamHead)
					c.Chunks(world.EventA) // this write includes the head
					rest := whole[len(world.EventA):]
					for n := min(cut, len(rest)); n > 0; n = min(cut, len(rest)) {
						c.Chunks(rest[:n])
						rest = rest[n:]
					}
					c.Send("0\r\n\r\n")
				}}
				w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Options: func(d *proxy.Options) { d.Wrap = tt.wrap }})
				if got := streamBytes(t, w, tt.proto); got != tt.want {
					t.Errorf("got  %q\nwant %q", got, tt.want)
				}
			})
		}
	}
}

// wrappedWriter is the writer of a filter: every write of the answer must go through it.
type wrappedWriter struct{ http.ResponseWriter }

func (w wrappedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// The client has received all events, and the proxy waits for prefill's answer. The
// answer remains intact, however long the stream has no event. Over HTTP/2 a deadline in
// the past would reset the stream.
func TestAnswerOutlivesLatePrefill(t *testing.T) {
	world.EachProtocol(t, func(t *testing.T, _ string, start func(world.Setup) (*world.World, *http.Client)) {
		const text = `{"choices":[{"text":"x","finish_reason":"length"}]}`
		_, c := start(world.Setup{
			Config: func(c *config.Config) { c.Timeouts.StreamIdle = config.Duration(time.Second) },
			Engines: []*world.Engine{
				{Name: "p0", Role: "prefill", Connector: "sglang", Serve: func(c *world.Conn, _ int) {
					time.Sleep(4 * time.Second) // below timeouts.cleanup
					c.JSON(200, text)
				}},
				{Name: "d0", Role: "decode", Connector: "sglang", Serve: func(c *world.Conn, _ int) { c.JSON(200, text) }},
			},
		})
		resp := world.Open(t, t.Context(), c, world.Completions(false))
		if body, err := io.ReadAll(resp.Body); err != nil || string(body) != text {
			t.Errorf("%q, %v", body, err)
		}
	})
}

// TestEarlyHints: the Link lines of an engine's answers 103 reach the client before its answer, and
// the answer has none of them. Other informational answers end at the proxy.
func TestEarlyHints(t *testing.T) {
	const hints = "HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\nLink: </b>\r\nX-Secret: 1\r\nAccess-Control-Allow-Origin: *\r\n\r\n"
	world.EachProtocol(t, func(t *testing.T, protocol string, start func(world.Setup) (*world.World, *http.Client)) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) {
			c.Send("HTTP/1.1 102 Processing\r\n\r\n", hints, "HTTP/1.1 103 Early Hints\r\nX-Other: 1\r\n\r\n", "HTTP/1.1 103 Early Hints\r\nLink: </c>\r\n\r\n")
			if strings.Contains(c.Leg.Body, `"stream":true`) {
				c.Stream(world.EventA, world.Done)
				return
			}
			c.JSON(200, world.Unary)
		}}
		_, client := start(world.Setup{Engines: []*world.Engine{e}})
		for _, stream := range []bool{false, true} {
			var got []string
			ctx := httptrace.WithClientTrace(context.Background(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
				got = append(got, strings.Join(h["Link"], "|"))
				if code != 103 || h.Get("X-Secret") != "" || h.Get("Access-Control-Allow-Origin") != "" {
					t.Errorf("%s: got %d %v", protocol, code, h)
				}
				return nil
			}})
			a := world.Ask(ctx, client, "POST", "http://proxy"+world.CompletionsPath, world.Completions(stream), "Content-Type", "application/json")
			if a.Status != 200 || a.Header.Get("Link") != "" || a.Header.Get("X-Request-Id") == "" || len(a.Header["X-Request-Id"]) != 1 || a.Header.Get("X-Secret") != "" {
				t.Errorf("%s: got %d %v", protocol, a.Status, a.Header)
			}
			if strings.Join(got, " ") != "</a>; rel=preload|</b> </c>" {
				t.Errorf("%s, stream %t: got the hints %q", protocol, stream, got)
			}
		}
	})
}
