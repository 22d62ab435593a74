package load

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

func near(got float32, want, share float64) bool {
	return math.Abs(float64(got)-want) <= share*want
}

func micros(f float64) time.Duration { return time.Duration(f * float64(time.Microsecond)) }

func TestSpeed(t *testing.T) {
	t.Run("none", func(t *testing.T) {
		var s Speed
		s.Measure(0, time.Second)
		s.Measure(-1, time.Second)
		s.Measure(10, 0)
		s.Measure(10, -time.Second)
		if s.PerToken() != 0 || s.Fixed() != 0 {
			t.Errorf("%v, %v", s.PerToken(), s.Fixed())
		}
	})
	t.Run("one", func(t *testing.T) {
		var s Speed
		s.Measure(1000, 50*time.Millisecond)
		if s.PerToken() != 50 || s.Fixed() != 0 {
			t.Errorf("%v, %v", s.PerToken(), s.Fixed())
		}
	})
	t.Run("one size", func(t *testing.T) {
		var s Speed
		for range 100 {
			s.Measure(1000, micros(5000+1000*20))
		}
		if !near(s.PerToken(), 25, 1e-3) || s.Fixed() != 0 {
			t.Errorf("%v, %v", s.PerToken(), s.Fixed())
		}
	})
	t.Run("two parts", func(t *testing.T) {
		var s Speed
		rng := rand.New(rand.NewPCG(1, 2))
		for range 300 {
			n := 100 + rng.Int64N(8000)
			s.Measure(n, micros(5000+float64(n)*20))
		}
		if !near(s.PerToken(), 20, 0.01) || !near(s.Fixed(), 5000, 0.01) {
			t.Errorf("%v, %v", s.PerToken(), s.Fixed())
		}
	})
	t.Run("noise", func(t *testing.T) {
		var s Speed
		rng := rand.New(rand.NewPCG(3, 4))
		for range 1000 {
			n := 100 + rng.Int64N(8000)
			s.Measure(n, micros((5000+float64(n)*20)*(0.9+0.2*rng.Float64())))
		}
		if !near(s.PerToken(), 20, 0.1) || s.Fixed() < 0 {
			t.Errorf("%v, %v", s.PerToken(), s.Fixed())
		}
	})
	t.Run("less for more", func(t *testing.T) { // the fit has no negative slope
		var s Speed
		for i := range 50 {
			s.Measure(int64(100+i*100), micros(10000-float64(i)*100))
		}
		if s.PerToken() <= 0 || s.Fixed() != 0 {
			t.Errorf("%v, %v", s.PerToken(), s.Fixed())
		}
	})
	t.Run("worse than by size", func(t *testing.T) { // the fit has no negative fixed part
		var s Speed
		for i := range 50 {
			n := float64(100 + i*100)
			s.Measure(int64(n), micros(n*n/100))
		}
		if s.PerToken() <= 0 || s.Fixed() != 0 {
			t.Errorf("%v, %v", s.PerToken(), s.Fixed())
		}
	})
	t.Run("outliers", func(t *testing.T) {
		var s Speed
		for range 100 {
			s.Measure(1000, 20*time.Millisecond)
		}
		s.Measure(1000, time.Minute)
		if !near(s.PerToken(), 20, 0.06) {
			t.Errorf("%v after a stall", s.PerToken())
		}
		s.Measure(1000, time.Microsecond)
		if !near(s.PerToken(), 20, 0.06) {
			t.Errorf("%v after an answer without work", s.PerToken())
		}
	})
	t.Run("slower for good", func(t *testing.T) {
		var s Speed
		for range 100 {
			s.Measure(1000, 20*time.Millisecond)
		}
		for range 600 {
			s.Measure(1000, 200*time.Millisecond)
		}
		if !near(s.PerToken(), 200, 0.01) {
			t.Errorf("got %v, want 200", s.PerToken())
		}
	})
	t.Run("faster for good", func(t *testing.T) {
		var s Speed
		for range 100 {
			s.Measure(1000, 200*time.Millisecond)
		}
		for range 600 {
			s.Measure(1000, 20*time.Millisecond)
		}
		if !near(s.PerToken(), 20, 0.01) {
			t.Errorf("got %v, want 20", s.PerToken())
		}
	})
}

// TestLine: a speed has a bandwidth and a set-up time only from enough samples whose sizes separate the
// two. If the noise hides the time per token, the bandwidth is a lower bound.
func TestLine(t *testing.T) {
	const fixed, perToken = 5000.0, 20.0 // µs
	size := func(n int) int64 { return int64(500 + 1500*(n%5)) }
	for _, tt := range []struct {
		name    string
		samples int
		size    func(n int) int64
		took    func(tokens, noise float64) float64 // µs; noise is between -1 and 1
		known   bool
		atLeast bool
		setUp   float64
		share   float64 // allowed deviation of both parts
	}{
		{name: "none"},
		{name: "too few", samples: KnownAfter - 1, size: size, took: func(n, _ float64) float64 { return fixed + perToken*n }},
		{name: "enough", samples: KnownAfter, size: size, took: func(n, _ float64) float64 { return fixed + perToken*n }, known: true, setUp: fixed, share: 1e-6},
		{name: "one size", samples: 200, size: func(int) int64 { return 4000 }, took: func(n, _ float64) float64 { return fixed + perToken*n }},
		{name: "a little noise", samples: 400, size: size, took: func(n, noise float64) float64 { return (fixed + perToken*n) * (1 + .05*noise) }, known: true, setUp: fixed, share: .15},
		{name: "no set-up", samples: 400, size: size, took: func(n, _ float64) float64 { return perToken * n }, known: true, setUp: 0, share: 1e-6},
		{name: "no time per token", samples: 400, size: size, took: func(_, noise float64) float64 { return fixed * (1 + .3*noise) }, known: true, atLeast: true, setUp: fixed, share: .3},
		{name: "shorter for more tokens", samples: 400, size: size, took: func(n, noise float64) float64 { return fixed - n/10 }, known: true, atLeast: true, setUp: fixed, share: .3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var s Speed
			rng := rand.New(rand.NewPCG(5, 6))
			for n := range tt.samples {
				s.Measure(tt.size(n), micros(tt.took(float64(tt.size(n)), 2*rng.Float64()-1)))
			}
			got := s.Line()
			if got.Samples != tt.samples || got.Known != tt.known || got.AtLeast != tt.atLeast {
				t.Fatalf("got %+v", got)
			}
			if !tt.known {
				if got.Bandwidth != 0 || got.SetUp != 0 {
					t.Errorf("got %+v", got)
				}
				return
			}
			if math.Abs(got.SetUp-tt.setUp) > tt.share*fixed {
				t.Errorf("set-up %v, want %v", got.SetUp, tt.setUp)
			}
			if real := 1e6 / perToken; tt.atLeast && got.Bandwidth < 10*real || !tt.atLeast && math.Abs(got.Bandwidth-real) > tt.share*real {
				t.Errorf("bandwidth %v, real %v", got.Bandwidth, real)
			}
		})
	}
	var followed Speed
	followed.Follow(Fit{PerToken: 1})
	if got := followed.Line(); got.Known || got.Samples != 0 {
		t.Errorf("the speed of another process: %+v", got)
	}
}

func BenchmarkMeasure(b *testing.B) {
	var s Speed
	n := int64(0)
	for b.Loop() {
		n++
		s.Measure(100+n%1000, time.Millisecond)
	}
}
