package proxy

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// Between the moment in which prefill's failure settles the attempt and the one
// in which it cancels decode, decode's answer must not pass for a success.
func TestTakeTellsPrefillsFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		failure := &legError{reason: "reset"}
		ctx, cancel := context.WithCancelCause(t.Context())
		a := &attempt{both: &concurrent{}}
		a.both.winner.Store(prefillFailed)
		time.AfterFunc(time.Second, func() { cancel(failure) })
		if err := a.claimAnswer(ctx, true); !errors.Is(err, failure) {
			t.Errorf("take: %v", err)
		}
		if a.orphan.KVRead {
			t.Error("decode counts as having taken over")
		}
	})
}

// A fault of the proxy's own in a leg beside decode ends the attempt, not the
// process.
func TestPanicBesideDecodeEndsTheAttempt(t *testing.T) {
	logged := &lines{}
	x := &exchange{} // no configuration: the leg panics
	x.journal.Open(journal.NewBooks(telemetry.New(prometheus.NewRegistry()), nil, slog.New(slog.NewTextHandler(logged, nil)), nil), t.Context(), http.Header{}, "r")
	a := &attempt{x: x, p: &coordinator.Placement{}, both: &concurrent{}}
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	if r := a.prefillBeside(t.Context(), connector.Leg{}, buffer.Get(1), cancel); !errors.Is(r.err, errPanicked) {
		t.Errorf("prefillBeside: %v", r.err)
	}
	if !errors.Is(context.Cause(ctx), errPanicked) || a.both.winner.Load() != prefillFailed {
		t.Errorf("decode goes on: cause %v, verdict %d", context.Cause(ctx), a.both.winner.Load())
	}
	if len(logged.text) == 0 {
		t.Error("the panic is not logged")
	}
}

// faulty is a connector that panics where it is told to.
type faulty struct {
	connector.Connector
	in string
}

func (f faulty) panicIn(place string) {
	if f.in == place {
		panic("faulty")
	}
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

// Wherever an exchange panics, its client learns that it failed, and no lease,
// leg or place is left; newWorld asserts that.
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
								c.hold() // until prefill's failure cancels it
								return
							}
							serve(c, nth)
						}},
					}})
					w.connectors[name] = faulty{w.connectors[name], in}
					a := w.post(completionsPath, completions(false))
					if a.err == nil && a.status != 500 {
						t.Errorf("status %d: %s", a.status, a.body)
					}
					w.outcome(telemetry.OutcomeInternal)
				})
			})
		}
	}
}

// lines is what was logged.
type lines struct{ text []byte }

func (l *lines) Write(p []byte) (int, error) {
	l.text = append(l.text, p...)
	return len(p), nil
}

// Where both legs run at once each may time out for the other's sake, so that
// the next attempt leaves the whole pair.
func TestHungDecodeIsLeftWithItsPair(t *testing.T) {
	const answer = `{"choices":[{"text":"x","finish_reason":"length"}]}`
	for range 8 { // the place policy draws
		synctest.Test(t, func(t *testing.T) {
			hung := &fakeEngine{name: "d0", role: "decode", connector: "sglang", serve: func(c *engineConn, _ int) { c.hold() }}
			serve := func(c *engineConn, _ int) {
				time.Sleep(time.Millisecond) // until decode has its leg
				if hung.holds(c.leg) {
					c.hold() // decode never comes for the KV
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
				t.Errorf("status %d: %s", a.status, a.body)
			}
			time.Sleep(time.Second) // until prefill's late answer is in
			if n := len(w.explained().Legs); n > 4 {
				t.Errorf("%d legs: the hung engine was asked twice", n)
			}
		})
	}
}

// holds reports whether the engine has the other leg of a pair.
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
