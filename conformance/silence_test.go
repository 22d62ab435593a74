package conformance

import (
	"fmt"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// burstRight sends four requests at the same time and asserts that all answers are right.
func (f *fleet) burstRight(text string) {
	f.t.Helper()
	bodies := make([]string, 4)
	answers := make([]chan answer, len(bodies))
	for n := range bodies {
		bodies[n] = chat(fmt.Sprint(text, " ", n), 8, n%2 == 0)
		answers[n] = make(chan answer, 1)
		go func() { answers[n] <- f.try(chatPath, bodies[n]) }()
	}
	for n, body := range bodies {
		f.right(<-answers[n], chatPath, body)
	}
}

// An engine that is stopped after legs were sent to it answers nothing, and
// closes no connection. Other engines answer its requests as soon as its probes
// fail. When it continues, nothing remains on it or on its peers.
func TestEngineStopped(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		for _, phase := range []string{enginesim.RolePrefill, enginesim.RoleDecode} {
			t.Run(phase, func(t *testing.T) {
				f := startFleet(t, connector, fleetOptions{config: func(c *config.Config) {
					c.Health.Timeout, c.Health.SuspectInterval = config.Duration(300*time.Millisecond), config.Duration(50*time.Millisecond)
				}})
				stopped := f.prefill[0]
				if phase == enginesim.RoleDecode {
					stopped = f.decode[0]
				}
				left := func() bool {
					return f.metric("pdproxy_leg_errors_total", `reason="silent"`, `phase="`+phase+`"`) > 0
				}
				// A probe may fail before a leg reaches the engine. Then the requests avoid it.
				for n := 0; n < 10 && !left(); n++ {
					f.waitReady()
					stopped.Stop(true)
					f.burstRight(fmt.Sprint("who stops? ", n))
					stopped.Stop(false)
				}
				if !left() {
					t.Error("no leg was abandoned")
				}
				f.settled()
			})
		}
	})
}
