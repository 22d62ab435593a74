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

// lines is what was logged.
type lines struct{ text []byte }

func (l *lines) Write(p []byte) (int, error) {
	l.text = append(l.text, p...)
	return len(p), nil
}
