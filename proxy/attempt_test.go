package proxy

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// faulty is a connector whose named methods panic.
type faulty struct {
	connector.Connector
	in string
}

func (f faulty) panicIn(place string) {
	if f.in == place {
		panic("faulty")
	}
}

func (f faulty) Serves(api openai.API) bool {
	f.panicIn("Serves")
	return f.Connector.Serves(api)
}

func (f faulty) Pairable(r *openai.Request) error {
	f.panicIn("Pairable")
	return f.Connector.Pairable(r)
}

func (f faulty) Prefill(a *connector.Attempt, dst []byte) (connector.Leg, error) {
	f.panicIn("Prefill")
	return f.Connector.Prefill(a, dst)
}

func (f faulty) ReadPrefill(a *connector.Attempt, body []byte) (connector.Handoff, error) {
	f.panicIn("ReadPrefill")
	return f.Connector.ReadPrefill(a, body)
}

func (f faulty) Decode(a *connector.Attempt, h *connector.Handoff, dst []byte) (connector.Leg, error) {
	f.panicIn("Decode")
	return f.Connector.Decode(a, h, dst)
}

// Wherever an exchange panics, its client gets an error, and the exchange leaves no
// lease, no leg and no place in a queue. newWorld asserts the latter.
func TestPanicLeavesNothingBehind(t *testing.T) {
	answers := map[string]string{
		"vllm-nixl": `{"choices":[]}`,
		"sglang":    `{"choices":[{"text":"x","finish_reason":"length"}]}`,
	}
	for name, answer := range answers {
		for _, in := range []string{"Pairable", "Prefill", "ReadPrefill", "Decode"} {
			t.Run(name+" "+in, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					serve := func(c *engineConn, _ int) { c.json(200, answer) }
					w := newWorld(t, setup{engines: []*fakeEngine{
						{name: "p0", role: "prefill", connector: name, serve: serve},
						{name: "d0", role: "decode", connector: name, serve: func(c *engineConn, nth int) {
							if in == "ReadPrefill" {
								c.hold() // until the failure of prefill cancels the leg
								return
							}
							serve(c, nth)
						}},
					}})
					w.SetConnectors(append(connector.All(), faulty{w.connector(name), in}))
					a := w.post(completionsPath, completions(false))
					if a.err == nil && a.status != 500 {
						t.Errorf("got status %d: %s", a.status, a.body)
					}
					w.outcome(telemetry.OutcomeInternal)
				})
			})
		}
	}
}

// An exchange that panics when its wait for an engine has brought a placement leaves the line of its
// model. newWorld asserts that it leaves no lease.
func TestPanicEndsTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, e, back := emptyWorld(t, time.Hour, nil)
		w.SetConnectors(append(connector.All(), faulty{w.connector(e.spec().Connector), "Serves"}))
		ended := make(chan answer)
		go func() { ended <- w.post(completionsPath, asking("m")) }()
		synctest.Wait()
		if n := w.waiting.Len(); n != 1 {
			t.Fatalf("%d requests wait", n)
		}
		back()
		if a := <-ended; a.err == nil && a.status != 500 {
			t.Errorf("got status %d: %s", a.status, a.body)
		}
		if n := w.waiting.Len(); n != 0 {
			t.Errorf("%d requests wait after the panic", n)
		}
		if n := w.metric("pdproxy_requests_waiting", "m"); n != 0 {
			t.Errorf("%v waiting requests are counted after the panic", n)
		}
		w.outcome(telemetry.OutcomeInternal)
	})
}

// If both legs run at the same time, each leg may time out because of the other engine.
// So the next attempt uses two other engines.
func TestHungDecodeIsLeftWithItsPair(t *testing.T) {
	const answer = `{"choices":[{"text":"x","finish_reason":"length"}]}`
	for range 8 { // the place policy chooses at random
		synctest.Test(t, func(t *testing.T) {
			hung := &fakeEngine{name: "d0", role: "decode", connector: "sglang", serve: func(c *engineConn, _ int) { c.hold() }}
			serve := func(c *engineConn, _ int) {
				time.Sleep(time.Millisecond) // until decode has received its leg
				if hung.holds(c.leg) {
					c.hold() // decode never reads the KV
					return
				}
				c.json(200, answer)
			}
			w := newWorld(t, setup{
				config: func(c *config.Config) {
					c.Timeouts.Prefill, c.Timeouts.FirstByte = config.Duration(time.Second), config.Duration(2*time.Second)
				},
				engines: []*fakeEngine{
					{name: "p0", role: "prefill", connector: "sglang", serve: serve},
					{name: "p1", role: "prefill", connector: "sglang", serve: serve},
					hung,
					{name: "d1", role: "decode", connector: "sglang", serve: func(c *engineConn, _ int) { c.json(200, answer) }},
				},
			})
			if a := w.post(completionsPath, completions(false)); a.status != 200 {
				t.Errorf("got status %d: %s", a.status, a.body)
			}
			time.Sleep(time.Second) // until the proxy has received prefill's late answer
			if n := len(w.explained().Legs); n > 4 {
				t.Errorf("got %d legs: the hung engine received two", n)
			}
		})
	}
}

// holds reports whether the engine has received the other leg of a pair.
func (e *fakeEngine) holds(leg seenLeg) bool {
	_, room, _ := strings.Cut(leg.body, `"bootstrap_room":`)
	room, _, _ = strings.Cut(room, ",")
	for _, mine := range e.seen() {
		if strings.Contains(mine.body, `"bootstrap_room":`+room) {
			return true
		}
	}
	return false
}
