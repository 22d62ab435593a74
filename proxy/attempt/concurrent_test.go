package attempt

import (
	"context"
	"testing"
)

// TestLegFailedBeside: of two legs that failed, decode's is to blame only if its engine
// was out of reach, or prefill's leg was merely cancelled.
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
				t.Errorf("blamed is %v", got)
			}
		})
	}
}
