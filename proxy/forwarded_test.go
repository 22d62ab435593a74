package proxy_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"

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
