package exchange

import (
	"math"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// TestBooked: no number in a request makes the booked tokens large or negative.
func TestBooked(t *testing.T) {
	for _, tt := range []struct{ limit, n, want int64 }{
		{-1, 1, maxBooked}, {0, 1, 0}, {5, 0, 5}, {5, 3, 15}, {5, -1, 5}, {math.MaxInt64, 1, maxBooked},
		{100, math.MaxInt64, 100 * maxSequences}, {math.MaxInt64, math.MaxInt64, maxBooked * maxSequences},
	} {
		var x exchange
		x.req.API, x.req.MaxTokens, x.req.N = openai.Completions, tt.limit, tt.n
		if got := x.booked(); got != tt.want {
			t.Errorf("max_tokens %d, n %d: booked %d, want %d", tt.limit, tt.n, got, tt.want)
		}
	}
}
