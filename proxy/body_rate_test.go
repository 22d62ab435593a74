package proxy

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestBodyRateEndsWithTheBody: the least rate of a body says nothing of the time after
// the body: an engine may take minutes for the answer.
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
			t.Errorf("%d bodies are being read", n)
		}
		if a := <-answers; a.status != 200 {
			t.Errorf("status %d, %v: %s", a.status, a.err, a.body)
		}
	})
}
