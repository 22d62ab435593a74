package exchange

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

func targetNamed(name string) engine.Target {
	return engine.Target{Instance: &engine.Instance{Spec: config.Engine{Name: name}}}
}

// For each kind of error: the error that the client gets, and the outcome that is counted.
func TestPublicError(t *testing.T) {
	leg := func(e *attempt.Error) error {
		e.Phase, e.Target = abi.Decode, targetNamed("d0")
		return fmt.Errorf("wrapped: %w", e)
	}
	tests := []struct {
		name              string
		err               error
		status            int
		class, code, text string
		param             string
		outcome           telemetry.Outcome
		retryAfter        bool
	}{
		{"request is at fault", openai.NewFieldError(openai.CodeInvalidType, "model", "m"), 400, "invalid_request_error", "invalid_type", "m", "model", telemetry.OutcomeClientError, false},
		{"no key", admission.ErrNoKey, 401, "authentication_error", "invalid_api_key", "Bearer", "", telemetry.OutcomeClientError, false},
		{"not carried", errNotCarried("sglang", openai.VLLMGenerate), 501, "invalid_request_error", "not_implemented", "sglang", "", telemetry.OutcomeClientError, false},
		{"queue full", admission.ErrQueueFull, 429, "rate_limit_error", "queue_full", "too many", "", telemetry.OutcomeShed, true},
		{"queue time", admission.ErrQueueTimeout, 503, "overloaded_error", "queue_timeout", "in time", "", telemetry.OutcomeShed, true},
		{"client's share", admission.ErrClientLimit, 429, "rate_limit_error", "client_limit", "client", "", telemetry.OutcomeShed, true},
		{"no target", &coordinator.NoTargetError{Phase: abi.Prefill, Model: "m"}, 503, "overloaded_error", "no_target", "prefill", "", telemetry.OutcomeNoTarget, true},
		{"rejected", &coordinator.RejectedError{}, 503, "overloaded_error", "rejected_by_policy", "policy", "", telemetry.OutcomeNoTarget, true},
		{"rejected, too many requests", &coordinator.RejectedError{Status: 429}, 429, "rate_limit_error", "rejected_by_policy", "policy", "", telemetry.OutcomeNoTarget, true},
		{"rejected as wrong", &coordinator.RejectedError{Status: 403}, 403, "invalid_request_error", "rejected_by_policy", "policy", "", telemetry.OutcomeNoTarget, false},
		{"rejected for now", &coordinator.RejectedError{Status: 529}, 529, "overloaded_error", "rejected_by_policy", "policy", "", telemetry.OutcomeNoTarget, false},
		{"unknown model", coordinator.ErrUnknownModel, 404, "invalid_request_error", "model_not_found", "model", "model", telemetry.OutcomeClientError, false},
		{"no id", coordinator.ErrNoID, 503, "overloaded_error", "no_id", "no disagg id", "", telemetry.OutcomeInternal, true},
		{"model needed", coordinator.ErrModelNeeded, 400, "invalid_request_error", "missing_field", "model", "model", telemetry.OutcomeClientError, false},
		{"draining", downstream.ErrDraining, 503, "overloaded_error", "draining", "shutting down", "", telemetry.OutcomeInternal, true},
		{"cancelled", context.Canceled, 503, "overloaded_error", "draining", "shutting down", "", telemetry.OutcomeInternal, true},
		{"leg failed", leg(&attempt.Error{Reason: "reset", Code: 502}), 502, "upstream_error", "leg_failed", `the decode leg on engine "d0" failed (reset)`, "", telemetry.OutcomeEngineError, false},
		{"leg timed out", leg(&attempt.Error{Reason: "timeout", Code: 504}), 504, "upstream_error", "leg_timeout", `the decode leg on engine "d0" timed out (timeout)`, "", telemetry.OutcomeTimeout, false},
		{"panicked", attempt.ErrPanicked, 500, "internal_error", "internal", "internal error", "", telemetry.OutcomeInternal, false},
		{"any other", errors.New("secret detail"), 500, "internal_error", "internal", "internal error", "", telemetry.OutcomeInternal, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := httptest.NewRecorder()
			downstream.Error(w, PublicError(tt.err))
			var got struct {
				Error struct{ Message, Type, Code, Param *string }
			}
			if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
				t.Fatal(err)
			}
			e := got.Error
			if w.Code != tt.status || text(e.Type) != tt.class || text(e.Code) != tt.code || text(e.Param) != tt.param || !strings.Contains(text(e.Message), tt.text) {
				t.Errorf("got status %d: %s", w.Code, w.Body)
			}
			if (e.Param == nil) != (tt.param == "") {
				t.Errorf("param is %v", e.Param)
			}
			h := w.Header()
			if (h.Get("Retry-After") != "") != tt.retryAfter || h.Get("Content-Type") != "application/json" || h.Get("Content-Length") != fmt.Sprint(w.Body.Len()) {
				t.Errorf("header %v", h)
			}
			if o := outcomeOf(tt.err); o != tt.outcome {
				t.Errorf("got outcome %v, want %v", o, tt.outcome)
			}
			if strings.Contains(w.Body.String(), "secret") {
				t.Error("the client's error shows an internal problem of the proxy")
			}
		})
	}
}

func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
