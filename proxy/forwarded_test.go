package proxy_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/accesslog"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// TestTrustedProxies: limits.per_client counts the clients that a trusted proxy names. A
// reload changes the list of trusted proxies.
func TestTrustedProxies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		w := newWorld(t, world.Setup{
			Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) {
				<-hold
				c.JSON(200, world.Unary)
			}}},
			Config: func(c *config.Config) { c.Limits.PerClient = 1 },
		})
		trust := func(networks ...string) {
			cfg := *w.Config
			cfg.Server.TrustedProxies = networks
			w.Reload(&cfg, nil)
		}
		// ask sends a request from the balancer 10.0.0.1 for a client.
		ask := func(client string) (status chan int) {
			status = make(chan int, 1)
			r := httptest.NewRequestWithContext(t.Context(), "POST", world.CompletionsPath, strings.NewReader(world.Completions(false)))
			r.RemoteAddr = "10.0.0.1:4711"
			r.Header.Set("X-Forwarded-For", client)
			go func() {
				answer := httptest.NewRecorder()
				w.Handler().ServeHTTP(answer, r)
				status <- answer.Code
			}()
			synctest.Wait()
			return status
		}
		trust("10.0.0.0/8")
		one, two := ask("192.0.2.1"), ask("192.0.2.2")
		if got := <-ask("192.0.2.1"); got != http.StatusTooManyRequests {
			t.Errorf("second request of one client: got status %d", got)
		}
		trust()
		three := ask("192.0.2.3")
		if got := <-ask("192.0.2.4"); got != http.StatusTooManyRequests {
			t.Errorf("second request of the balancer, which is not trusted: got status %d", got)
		}
		close(hold)
		for _, status := range []chan int{one, two, three} {
			if got := <-status; got != http.StatusOK {
				t.Errorf("got status %d", got)
			}
		}
	})
}

// TestAccessLogOfProtocols: the access log has the protocol and the bytes of the bodies.
func TestAccessLogOfProtocols(t *testing.T) {
	eachProtocol(t, func(t *testing.T, proto string, open func(world.Setup) (*world.World, *http.Client)) {
		path := filepath.Join(t.TempDir(), "access")
		access, err := accesslog.Open(path, config.AccessLogJSON, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		w, _ := open(world.Setup{
			Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.Stream(world.EventA, world.EventB, world.Done) }}},
			Options: func(o *proxy.Options) { o.AccessLog = access },
		})
		answer := w.Post(world.CompletionsPath+"?a=b", world.Completions(true))
		synctest.Wait()
		if err := access.Close(); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var e accesslog.Entry
		if err := json.Unmarshal(text, &e); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if e.Protocol != proto || e.Path != world.CompletionsPath || e.BytesIn != int64(len(world.Completions(true))) || e.BytesOut != int64(len(answer.Body)) || answer.Status != 200 {
			t.Errorf("got %s, want %s and %d bytes of the answer", text, proto, len(answer.Body))
		}
	})
}

// TestAccessLogAddress: the address is that which a trusted proxy names, and the line has no port.
func TestAccessLogAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "access")
		access, err := accesslog.Open(path, config.AccessLogCommon, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		w := newWorld(t, world.Setup{
			Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}},
			Config:  func(c *config.Config) { c.Server.TrustedProxies = []string{"10.0.0.0/8"} },
			Options: func(o *proxy.Options) { o.AccessLog = access },
		})
		for _, peer := range []string{"10.0.0.1:4711", "[2001:db8::7]:4711", "192.0.2.1:4711"} {
			r := httptest.NewRequestWithContext(t.Context(), "POST", world.CompletionsPath+"?key=secret", strings.NewReader(world.Completions(false)))
			r.RemoteAddr = peer
			r.Header.Set("X-Forwarded-For", "198.51.100.9")
			w.Handler().ServeHTTP(httptest.NewRecorder(), r)
		}
		if err := access.Close(); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(string(text), "\n")
		for i, want := range []string{"198.51.100.9 - - [", "2001:db8::7 - - [", "192.0.2.1 - - ["} {
			if end := fmt.Sprintf(`] "POST %s HTTP/1.1" 200 %d`, world.CompletionsPath, len(world.Unary)); !strings.HasPrefix(lines[i], want) || !strings.HasSuffix(lines[i], end) {
				t.Errorf("got %s, want %s...%s", lines[i], want, end)
			}
		}
	})
}
