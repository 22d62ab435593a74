package proxy_test

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// TestAnnouncedBodiesAreRefused: the proxy refuses a body that announces more bytes than
// the limit before the client has sent any.
func TestAnnouncedBodiesAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, world.Setup{Config: func(c *config.Config) { c.Server.MaxBody = 1000 }})
		c, err := w.DialPublic(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: proxy\r\nContent-Type: application/json\r\nContent-Length: 1001\r\n\r\n", world.CompletionsPath)
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

// An announced length takes no memory before the bytes arrive.
func TestAnnouncedBodiesTakeNoMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, world.Setup{Engines: []*world.Engine{{}}})
		var conns []net.Conn
		for range 50 {
			conn, err := w.Public.Dial()
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, conn)
			fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n{", world.CompletionsPath, 16<<20)
		}
		synctest.Wait()
		if n := w.Reading(); n != len(conns) {
			t.Errorf("got %d bodies in progress, want %d", n, len(conns))
		}
		if n := w.Memory.Used(); n > int64(len(conns))*buffer.FirstRead {
			t.Errorf("got %d bytes of memory for %d received bytes", n, len(conns))
		}
		if n := w.Metric("pdproxy_buffer_bytes"); n != float64(w.Memory.Used()) {
			t.Errorf("pdproxy_buffer_bytes: got %v, want %d", n, w.Memory.Used())
		}
		for _, c := range conns {
			c.Close()
		}
	})
}

// TestBodyRateEndsWithTheBody: server.min_body_rate does not apply after the end of the
// body, because an engine may need minutes for the answer.
func TestBodyRateEndsWithTheBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) {
			time.Sleep(2 * time.Minute)
			c.JSON(200, world.Unary)
		}}}, Config: func(c *config.Config) { c.Server.MinBodyRate = 1000 }})
		answers := make(chan world.Answer)
		go func() { answers <- w.Post(world.CompletionsPath, world.Completions(false)) }()
		time.Sleep(time.Minute)
		if n := w.Reading(); n != 0 {
			t.Errorf("the proxy still reads %d bodies", n)
		}
		if a := <-answers; a.Status != 200 {
			t.Errorf("got status %d, error %v: %s", a.Status, a.Err, a.Body)
		}
	})
}

// TestBodyOfAClientThatLeaves: a request whose client leaves inside the body counts as cancelled.
func TestBodyOfAClientThatLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, world.Setup{})
		conn, err := w.Public.Dial()
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: proxy\r\nContent-Length: 100\r\n\r\n{", world.CompletionsPath)
		conn.Close()
		synctest.Wait()
		w.Outcome(telemetry.OutcomeCancelled)
	})
}
