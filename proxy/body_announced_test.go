package proxy

import (
	"bufio"
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestAnnouncedBodiesAreRefused: the proxy refuses a body that announces more bytes than
// the limit before the client has sent any.
func TestAnnouncedBodiesAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{config: func(c *config.Config) { c.Server.MaxBody = 1000 }})
		c, err := w.dialPublic(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: proxy\r\nContent-Type: application/json\r\nContent-Length: 1001\r\n\r\n", completionsPath)
		began := time.Now()
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if took := time.Since(began); resp.StatusCode != 413 || took > time.Second {
			t.Errorf("got status %d after %v", resp.StatusCode, took)
		}
	})
}
