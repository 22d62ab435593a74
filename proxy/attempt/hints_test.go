package attempt_test

import (
	"context"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

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
