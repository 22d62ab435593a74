package proxy

import (
	"context"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"testing"
)

// TestEarlyHints: the Link lines of an engine's answers 103 reach the client before its answer, and
// the answer has none of them. Other informational answers end at the proxy.
func TestEarlyHints(t *testing.T) {
	const hints = "HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\nLink: </b>\r\nX-Secret: 1\r\nAccess-Control-Allow-Origin: *\r\n\r\n"
	eachProtocol(t, func(t *testing.T, protocol string, start func(setup) (*world, *http.Client)) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) {
			c.send("HTTP/1.1 102 Processing\r\n\r\n", hints, "HTTP/1.1 103 Early Hints\r\nX-Other: 1\r\n\r\n", "HTTP/1.1 103 Early Hints\r\nLink: </c>\r\n\r\n")
			if strings.Contains(c.leg.body, `"stream":true`) {
				c.stream(eventA, done)
				return
			}
			c.json(200, unary)
		}}
		_, client := start(setup{engines: []*fakeEngine{e}})
		for _, stream := range []bool{false, true} {
			var got []string
			ctx := httptrace.WithClientTrace(context.Background(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
				got = append(got, strings.Join(h["Link"], "|"))
				if code != 103 || h.Get("X-Secret") != "" || h.Get("Access-Control-Allow-Origin") != "" {
					t.Errorf("%s: got %d %v", protocol, code, h)
				}
				return nil
			}})
			a := ask(ctx, client, "POST", "http://proxy"+completionsPath, completions(stream), "Content-Type", "application/json")
			if a.status != 200 || a.header.Get("Link") != "" || a.header.Get("X-Request-Id") == "" || len(a.header["X-Request-Id"]) != 1 || a.header.Get("X-Secret") != "" {
				t.Errorf("%s: got %d %v", protocol, a.status, a.header)
			}
			if strings.Join(got, " ") != "</a>; rel=preload|</b> </c>" {
				t.Errorf("%s, stream %t: got the hints %q", protocol, stream, got)
			}
		}
	})
}
