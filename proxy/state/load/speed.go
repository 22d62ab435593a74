package load

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Speed is a measured time as a function of a number of tokens: a fixed part and a part
// per token, by least squares with fading weights. If the measured sizes are too similar
// to separate the two parts, all is per token. The zero value has no measurement. Reading
// takes no lock.
type Speed struct {
	fit atomic.Uint64 // two float32: µs per token, and fixed µs above them

	mu               sync.Mutex
	count            int     // guarded by mu
	x, y             float64 // means of tokens and µs; guarded by mu
	varX, cov        float64 // of tokens, and of both; guarded by mu
	perToken, steady float64 // the present fit; guarded by mu
}

const (
	// speedMemory is the number of recent measurements from which a Speed is computed.
	speedMemory = 64
	// knownAfter is the number of measurements after which a measurement can be an
	// outlier.
	knownAfter = 16
	// outlier bounds the ratio of a measurement to the expected time. Larger measurements
	// are reduced to this ratio. So one stall changes little, and a lasting change still
	// has an effect.
	outlier = 4
	// leastSpread is the smallest relative deviation of token counts that separates the
	// fixed part from the part per token.
	leastSpread = 0.1
)

// Measure adds a measurement: took for that many tokens. It ignores 0 tokens and 0 time.
func (s *Speed) Measure(tokens int64, took time.Duration) {
	if tokens <= 0 || took <= 0 {
		return
	}
	x, y := float64(tokens), float64(took)/float64(time.Microsecond)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.count >= knownAfter {
		y = min(y, outlier*(s.steady+s.perToken*x))
	}
	s.count = min(s.count+1, speedMemory)
	a := 1 / float64(s.count)
	dx, dy := x-s.x, y-s.y
	s.x += a * dx
	s.y += a * dy
	s.varX = (1 - a) * (s.varX + a*dx*dx)
	s.cov = (1 - a) * (s.cov + a*dx*dy)

	s.perToken, s.steady = s.y/s.x, 0
	if spread := leastSpread * s.x; s.varX > spread*spread {
		if slope := s.cov / s.varX; slope > 0 && slope < s.perToken {
			s.perToken, s.steady = slope, s.y-slope*s.x
		}
	}
	s.fit.Store(uint64(math.Float32bits(float32(s.steady)))<<32 | uint64(math.Float32bits(float32(s.perToken))))
}

// Fit is a measured speed: the time per token and the fixed time, in µs; 0: unknown.
type Fit struct{ PerToken, Fixed float32 }

// Fit returns the present speed.
func (s *Speed) Fit() Fit {
	fit := s.fit.Load()
	return Fit{PerToken: math.Float32frombits(uint32(fit)), Fixed: math.Float32frombits(uint32(fit >> 32))}
}

// Follow sets the speed to another process's measurement, until the next measurement here.
// It ignores an empty fit.
func (s *Speed) Follow(f Fit) {
	if f.PerToken > 0 {
		s.fit.Store(uint64(math.Float32bits(f.Fixed))<<32 | uint64(math.Float32bits(f.PerToken)))
	}
}

// PerToken returns the time per token in µs; 0: unknown.
func (s *Speed) PerToken() float32 { return math.Float32frombits(uint32(s.fit.Load())) }

// Fixed returns the time in µs that does not depend on the tokens; 0: unknown.
func (s *Speed) Fixed() float32 { return math.Float32frombits(uint32(s.fit.Load() >> 32)) }
