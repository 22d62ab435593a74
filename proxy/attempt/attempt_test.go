package attempt

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/prometheus/client_golang/prometheus"
)

// TestClaimAnswerAfterPrefillFailed: prefill's failure decides the attempt a moment before it
// cancels decode. If decode answers in between, the attempt must not succeed.
func TestClaimAnswerAfterPrefillFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		failure := &Error{Reason: "reset"}
		ctx, cancel := context.WithCancelCause(t.Context())
		a := &attempt{concurrent: true}
		a.both.winner.Store(prefillFailed)
		time.AfterFunc(time.Second, func() { cancel(failure) })
		if err := a.claimAnswer(ctx, true); !errors.Is(err, failure) {
			t.Errorf("claimAnswer returned %v, want prefill's failure", err)
		}
		if a.kvRead {
			t.Error("kvRead is set, want false: decode must not have the KV")
		}
	})
}

// TestPanicBesideDecodeEndsTheAttempt: a panic in the concurrent prefill leg ends the attempt,
// not the process.
func TestPanicBesideDecodeEndsTheAttempt(t *testing.T) {
	logged := &lines{}
	env := &Env{Journal: new(journal.Journal)} // no configuration: the leg panics
	env.Journal.Open(journal.NewBooks(telemetry.New(prometheus.NewRegistry()), nil, nil, slog.New(slog.NewTextHandler(logged, nil)), nil), t.Context(), http.Header{}, "r")
	a := &attempt{env: env, owed: owed{p: &coordinator.Placement{}}}
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	if r := a.prefillBeside(t.Context(), connector.Leg{}, buffer.Get(1), cancel); !errors.Is(r.err, ErrPanicked) {
		t.Errorf("prefillBeside returned the error %v, want ErrPanicked", r.err)
	}
	if !errors.Is(context.Cause(ctx), ErrPanicked) || a.both.winner.Load() != prefillFailed {
		t.Errorf("decode is not cancelled: cause %v, winner %d; want ErrPanicked and prefillFailed", context.Cause(ctx), a.both.winner.Load())
	}
	if len(logged.text) == 0 {
		t.Error("the log is empty, want the panic")
	}
}

// lines collects the output of a logger.
type lines struct{ text []byte }

func (l *lines) Write(p []byte) (int, error) {
	l.text = append(l.text, p...)
	return len(p), nil
}
