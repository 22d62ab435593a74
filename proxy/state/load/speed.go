package load

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Speed is a measured time as a function of a number of tokens: a fixed part
// and so much per token, by least squares in which every measurement weighs less
// than the next. Where the measurements are of too few sizes to tell the two
// parts apart, all is taken to be per token. The zero value has no measurement.
// Reading takes no lock.
type Speed struct {
	fit atomic.Uint64 // two float32: µs per token, and fixed µs above them

	mu               sync.Mutex
	count            int     // guarded by mu
	x, y             float64 // means of tokens and µs; guarded by mu
	varX, cov        float64 // of tokens, and of both; guarded by mu
	perToken, steady float64 // the present fit; guarded by mu
}

const (
	// speedMemory is how many measurements shape a Speed.
	speedMemory = 64
	// knownAfter is after how many measurements one that is far from what was
	// expected counts as an outlier.
	knownAfter = 16
	// outlier is how many times longer than expected a measurement may be; what
	// is above that is cut off, so that one stall changes little and a lasting
	// change still comes through.
	outlier = 4
	// leastSpread is the least relative deviation of token counts that tells the
	// fixed part from the part per token.
	leastSpread = 0.1
)

// Measure notes that tokens took so long. Nothing is noted of no tokens or no
// time.
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

// Fit is what a Speed says: the time per token and the fixed time besides, in
// µs; 0 while there is no measurement.
type Fit struct{ PerToken, Fixed float32 }

// Fit returns what the speed says now.
func (s *Speed) Fit() Fit {
	fit := s.fit.Load()
	return Fit{PerToken: math.Float32frombits(uint32(fit)), Fixed: math.Float32frombits(uint32(fit >> 32))}
}

// Follow makes the speed say what another process has measured, until the next
// measurement here. A fit that says nothing changes nothing.
func (s *Speed) Follow(f Fit) {
	if f.PerToken > 0 {
		s.fit.Store(uint64(math.Float32bits(f.Fixed))<<32 | uint64(math.Float32bits(f.PerToken)))
	}
}

// PerToken is the time per token in µs; 0 while there is no measurement.
func (s *Speed) PerToken() float32 { return math.Float32frombits(uint32(s.fit.Load())) }

// Fixed is the time in µs that does not depend on the tokens; 0 while there is
// no measurement.
func (s *Speed) Fixed() float32 { return math.Float32frombits(uint32(s.fit.Load() >> 32)) }
