package proxy_test

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

const anyPort = "127.0.0.1:0"

// The proxy resets the stream of an HTTP/3 client that stops reading.
func TestHTTP3Unread(t *testing.T) {
	e := &world.Engine{Serve: func(c *world.Conn, _ int) {
		c.JSON(200, fmt.Sprintf(`{"id":"1","choices":[{"text":"x","finish_reason":"stop"}],"x":%q}`, strings.Repeat("x", 4<<20)))
	}}
	certs, err := edge.LoadCerts("server.tls", config.TLS{SelfSigned: true}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, world.Setup{Sockets: true, Certs: certs, Engines: []*world.Engine{e}, Config: func(c *config.Config) {
		c.Server.HTTP3 = anyPort
		c.Server.WriteTimeout = config.Duration(300 * time.Millisecond)
	}})
	tr := &http3.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer tr.Close()
	r, err := http.NewRequest("POST", "https://"+w.Front.HTTP3Addr().String()+world.CompletionsPath, strings.NewReader(world.Completions(false)))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := tr.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for w.Running() > 0 {
		time.Sleep(time.Millisecond)
	}
	var reset *http3.Error
	if _, err := io.ReadAll(resp.Body); !errors.As(err, &reset) {
		t.Errorf("the client that reads after the limit: got error %v", err)
	}
}

// A head above the limit gets an answer with JSON.
func TestHTTP3HeadLimit(t *testing.T) {
	certs, err := edge.LoadCerts("server.tls", config.TLS{SelfSigned: true}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, world.Setup{Sockets: true, Certs: certs, Config: func(c *config.Config) {
		c.Server.HTTP3 = anyPort
		c.Server.MaxHeader = 8 << 10
	}})
	tr := &http3.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer tr.Close()
	for size, want := range map[int]int{4 << 10: 200, 20 << 10: 431} {
		a := world.Ask(t.Context(), &http.Client{Transport: tr}, "GET", "https://"+w.Front.HTTP3Addr().String()+"/version", "", "X-A", strings.Repeat("a", size), "X-Request-Id", "own-id")
		if a.Status != want || a.Header.Get("X-Request-Id") != "own-id" || want == 431 && !strings.Contains(a.Body, `"code":"head_too_large"`) {
			t.Errorf("%d bytes: got %+v", size, a)
		}
	}
}
