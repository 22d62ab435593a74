package downstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// If a body does not arrive completely, the error gives the reason.
func TestBodyErrors(t *testing.T) {
	gone, leave := context.WithCancelCause(t.Context())
	leave(ErrDraining)
	tests := []struct {
		name       string
		err        error
		status     int
		code, text string
	}{
		{"too large", errBodyTooLarge(9), 413, "body_too_large", "9 bytes"},
		{"too late", bodyReadError(t.Context(), fmt.Errorf("read: %w", os.ErrDeadlineExceeded)), 408, "body_timeout", "in time"},
		{"too slow", bodyReadError(gone, &stoppedBody{errBodySlow}), 408, "body_timeout", "min_body_rate"},
		{"made room", bodyReadError(t.Context(), &stoppedBody{ErrReading}), 408, "reading_limit", "slowest"},
		{"broken", bodyReadError(t.Context(), io.ErrUnexpectedEOF), 400, "body_incomplete", "body"},
	}
	for _, tt := range tests {
		var oe *openai.Error
		if !errors.As(tt.err, &oe) || oe.Status != tt.status || oe.Code.String() != tt.code || !strings.Contains(oe.Message, tt.text) {
			t.Errorf("%s: %v", tt.name, tt.err)
		}
		if BodyStopped(tt.err) != (tt.status == 408) {
			t.Errorf("%s: got BodyStopped = %v", tt.name, BodyStopped(tt.err))
		}
	}
	if err := bodyReadError(gone, io.ErrUnexpectedEOF); err != ErrDraining {
		t.Errorf("ended context: got %v, want the cause of its end", err)
	}
}
