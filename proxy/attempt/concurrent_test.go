package attempt

import (
	"context"
	"testing"
)

// TestLegFailedBeside: if both legs failed, decode is at fault only if the connection to its
// engine broke, or if prefill's leg did not fail by itself.
func TestLegFailedBeside(t *testing.T) {
	answered, broken, late := &Error{Status: 500, Code: 502}, &Error{Code: 502}, &Error{Code: 504}
	prefill := &Error{Status: 503, Code: 503}
	for name, tt := range map[string]struct {
		decode, prefill error
		blamesPrefill   bool
	}{
		"decode answered with a failure": {answered, prefill, true},
		"decode was cancelled":           {context.Canceled, prefill, true},
		"decode timed out":               {late, prefill, true},
		"decode's connection broke":      {broken, prefill, false},
		"prefill was cancelled":          {answered, context.Canceled, false},
		"prefill answered":               {answered, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			want := tt.decode
			if tt.blamesPrefill {
				want = tt.prefill
			}
			if got := firstCause(tt.decode, tt.prefill); got != want {
				t.Errorf("firstCause returned %v, want %v", got, want)
			}
		})
	}
}
