package proxy

import (
	"context"
	"testing"
)

// TestLegFailedBeside: of two legs that failed, decode's is to blame only if its engine
// was out of reach, or prefill's leg was merely cancelled.
func TestLegFailedBeside(t *testing.T) {
	answered, broken, late := &legError{status: 500, code: 502}, &legError{code: 502}, &legError{code: 504}
	prefill := &legError{status: 503, code: 503}
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
