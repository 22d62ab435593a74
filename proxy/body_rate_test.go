package proxy

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestBodyRateEndsWithTheBody: server.min_body_rate does not apply after the end of the
// body, because an engine may need minutes for the answer.
func TestBodyRateEndsWithTheBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{engines: []*fakeEngine{{serve: func(c *engineConn, _ int) {
			time.Sleep(2 * time.Minute)
			c.json(200, unary)
		}}}, config: func(c *config.Config) { c.Server.MinBodyRate = 1000 }})
		answers := make(chan answer)
		go func() { answers <- w.post(completionsPath, completions(false)) }()
		time.Sleep(time.Minute)
		if n := w.bodies.Reading(); n != 0 {
			t.Errorf("the proxy still reads %d bodies", n)
		}
		if a := <-answers; a.status != 200 {
			t.Errorf("got status %d, error %v: %s", a.status, a.err, a.body)
		}
	})
}
