package plot

import (
	"math"
	"slices"
	"testing"
)

func TestTicks(t *testing.T) {
	for _, tt := range []struct {
		scale Scale
		n     int
		want  []float64
	}{
		{Scale{From: 0, To: 1}, 7, []float64{0, .2, .4, .6, .8, 1}},
		{Scale{From: 15300, To: 18600}, 7, []float64{15500, 16000, 16500, 17000, 17500, 18000, 18500}},
		{Scale{From: 3, To: 60, Logarithmic: true}, 12, []float64{5, 10, 20, 50}},
		{Scale{From: 1, To: 1e5, Logarithmic: true}, 7, []float64{1, 10, 100, 1000, 1e4, 1e5}},
	} {
		got := tt.scale.ticks(tt.n)
		if !slices.EqualFunc(got, tt.want, func(a, b float64) bool { return math.Abs(a-b) < 1e-9*max(1, b) }) {
			t.Errorf("%+v: tt.scale.ticks(tt.n) = %v, want %v", tt.scale, got, tt.want)
		}
	}
}
