package proxy

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
)

// At max_connections the proxy closes an idle connection to serve a new client. If no
// connection is idle, the new client gets an error. Operators can always connect.
func TestMaxConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answer := make(chan struct{})
		e := &fakeEngine{serve: func(c *engineConn, _ int) {
			<-answer
			c.json(200, `{"id":"1","choices":[{"text":"x","finish_reason":"stop"}]}`)
		}}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, config: func(c *config.Config) { c.Limits.MaxConnections = 2 }})
		dial := func() net.Conn {
			c, err := w.public.Dial()
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
		writeRequest(t, busy, completions(false))
		synctest.Wait()

		second := dial()
		writeRequest(t, second, completions(false))
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
		w.prom.MustRegister(w.front)
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
			if got := w.metric(tt.name, strings.Fields(tt.label)...); got != tt.want {
				t.Errorf("%s %s: got %v, want %v", tt.name, tt.label, got, tt.want)
			}
		}
		if a := w.operate("GET", "/readyz", ""); a.status != 200 {
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
