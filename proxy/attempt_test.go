package proxy

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// Between the moment in which prefill's failure settles the attempt and the one
// in which it cancels decode, decode's answer must not pass for a success.
func TestTakeTellsPrefillsFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		failure := &legError{reason: "reset"}
		ctx, cancel := context.WithCancelCause(t.Context())
		a := &attempt{}
		a.verdict.Store(prefillFailed)
		time.AfterFunc(time.Second, func() { cancel(failure) })
		if err := a.take(ctx); !errors.Is(err, failure) {
			t.Errorf("take: %v", err)
		}
		if a.orphan.DecodeTook {
			t.Error("decode counts as having taken over")
		}
	})
}

// A fault of the proxy's own in a leg beside decode ends the attempt, not the
// process.
func TestPanicBesideDecodeEndsTheAttempt(t *testing.T) {
	logged := &lines{}
	a := &attempt{
		x: &exchange{s: &Server{log: slog.New(slog.NewTextHandler(logged, nil))}}, // no configuration: the leg panics
		p: &coordinator.Placement{},
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	if err := a.prefillBeside(t.Context(), connector.Leg{}, getBuffer(1), cancel); !errors.Is(err, errPanicked) {
		t.Errorf("prefillBeside: %v", err)
	}
	if !errors.Is(context.Cause(ctx), errPanicked) || a.verdict.Load() != prefillFailed {
		t.Errorf("decode goes on: cause %v, verdict %d", context.Cause(ctx), a.verdict.Load())
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
