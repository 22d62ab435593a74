package proxy_test

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
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
