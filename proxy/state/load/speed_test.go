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

func BenchmarkMeasure(b *testing.B) {
	var s Speed
	n := int64(0)
	for b.Loop() {
		n++
		s.Measure(100+n%1000, time.Millisecond)
	}
}
