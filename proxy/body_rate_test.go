package proxy_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

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
