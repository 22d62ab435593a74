package load

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// features is the number of features of a Regression. A caller that has fewer leaves the others
// at 0: their weights stay 0.
const features = 4

// Features describe one piece of work, or are the weights of such a description. Each value of
// a description is of the order of 1 to 1000.
type Features [features]float64

// Of returns the time of work x by the weights f.
func (f *Features) Of(x *Features) float64 {
	return f[0]*x[0] + f[1]*x[1] + f[2]*x[2] + f[3]*x[3]
}

const (
	// KnownAfter is the number of samples from which a Regression has the usual error of its
	// weights.
	KnownAfter = 16
	// memory is the number of recent samples from which a Speed is computed.
	memory = 64
	// outlier bounds the ratio of a sample to its prediction, and its inverse. A sample
	// beyond it is moved to it, so that one stall changes little and a lasting change still has an effect.
	outlier = 4
	// A sample whose error is above usualErrors mean errors, and above leastError, counts
	// less: in proportion to its error.
	usualErrors = 2
	leastError  = 0.02
	// longest is the most time in µs that a sample may have: a day.
	longest = 86400e6
)

// Regression is a line through the times of work in µs, by least squares with fading weights. The
// error of a sample counts in relation to the size of its work, not to its time: so a lasting
// change counts equally, whether engines become slower or faster. No weight of a feature is
// negative: no work makes engines faster. The zero value has no samples. Not safe for concurrent
// use.
type Regression struct {
	Count int     // samples
	Error float64 // mean absolute error of predictions, as a share of them

	square [features][features]float64 // sum of the products of features
	cross  [features]float64           // sum of the products of features and times
	times  float64                     // sum of the squares of times
}

// Learn adds a sample: work with features x took µs. said is the prediction for it, 0 if there
// was none. memory is the number of recent samples that count. False: the sample is ignored, because
// it is not finite, not positive or longer than a day.
func (r *Regression) Learn(x *Features, took, said float64, memory int) bool {
	size := 0.0 // squared
	for _, v := range x {
		if !(v >= 0 && v < 1e12) {
			return false
		}
		size += v * v
	}
	if !(took > 0 && took < longest && size > 0) {
		return false
	}
	trust := 1.0
	if said > 0 {
		took = min(max(took, said/outlier), outlier*said)
		off := math.Abs(took-said) / said
		if usual := max(usualErrors*r.Error, leastError); r.Count > KnownAfter && off > usual {
			trust = usual / off
		}
		r.Count = min(r.Count, math.MaxInt32)
		r.Error += (off - r.Error) / float64(min(max(r.Count-KnownAfter, 0)+1, memory))
	}
	r.Count++
	keep, scale := 1-trust/float64(memory), trust/size
	for i := range x {
		for j := range i + 1 {
			r.square[i][j] = keep*r.square[i][j] + x[i]*x[j]*scale
		}
		r.cross[i] = keep*r.cross[i] + x[i]*took*scale
	}
	r.times = keep*r.times + took*took*scale
	return true
}

// Weights returns the weights without the features of out. A feature whose weight would be
// negative gets 0, and the others are fitted without it.
func (r *Regression) Weights(out [features]bool) Features {
	for {
		w, ok := r.cholesky(&out)
		if !ok {
			return Features{}
		}
		worst, least := -1, 0.0
		for i, v := range w {
			if v < 0 && v*math.Sqrt(r.square[i][i]) < least {
				worst, least = i, v*math.Sqrt(r.square[i][i])
			}
		}
		if worst < 0 {
			return w
		}
		out[worst] = true
	}
}

// ridge is added to the squares as a share, so that features that say the same have a
// solution.
const ridge = 1e-9

// cholesky solves the normal equations of the features that are not out. ok is false if
// the result is not finite.
func (r *Regression) cholesky(out *[features]bool) (w Features, ok bool) {
	var l [features][features]float64
	var z [features]float64
	for i := range features {
		if out[i] || r.square[i][i] < 1e-300 {
			continue
		}
		sum := r.cross[i]
		for j := range i {
			v := r.square[i][j]
			if l[j][j] == 0 {
				continue
			}
			for k := range j {
				v -= l[i][k] * l[j][k]
			}
			l[i][j] = v / l[j][j]
			sum -= l[i][j] * z[j]
		}
		d := r.square[i][i]
		for k := range i {
			d -= l[i][k] * l[i][k]
		}
		l[i][i] = math.Sqrt(max(d, 0) + ridge*r.square[i][i])
		z[i] = sum / l[i][i]
	}
	for i := features - 1; i >= 0; i-- {
		if l[i][i] == 0 {
			continue
		}
		v := z[i]
		for k := i + 1; k < features; k++ {
			v -= l[k][i] * w[k]
		}
		w[i] = v / l[i][i]
		if math.IsNaN(w[i]) || math.IsInf(w[i], 0) {
			return Features{}, false
		}
	}
	return w, true
}

// Speed is a measured time as a function of a number of tokens: a fixed part and a part
// per token. If the measured sizes do not separate the two parts, all is per token. The zero
// value has no measurement. Reading takes no lock.
type Speed struct {
	fit atomic.Uint64 // two float32: µs per token, and fixed µs above them

	mu             sync.Mutex
	line           *Regression // of units of perTokens tokens; nil: no measurement; guarded by mu
	fixed, perUnit float64     // the present fit; guarded by mu
}

const (
	// perTokens is the number of tokens in a unit of the second feature of a Speed.
	perTokens = 1000
	// leastSpread is the smallest relative deviation of token counts that separates the
	// fixed part from the part per token.
	leastSpread = 0.1
	// mostError is the largest relative standard error of a time per token that is no bound.
	mostError = 0.25
)

// Measure adds a measurement: took for that many tokens. It ignores 0 tokens and 0 time.
func (s *Speed) Measure(tokens int64, took time.Duration) {
	if tokens <= 0 || took <= 0 {
		return
	}
	x, said := Features{1, float64(tokens) / perTokens}, 0.0
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.line == nil {
		s.line = new(Regression)
	}
	if s.line.Count >= KnownAfter {
		said = s.fixed + s.perUnit*x[1]
	}
	if !s.line.Learn(&x, float64(took)/float64(time.Microsecond), said, memory) {
		return
	}
	q, c := &s.line.square, &s.line.cross
	s.fixed, s.perUnit = 0, c[1]/q[1][1]
	if spread := s.line.spread(); spread > 0 {
		fixed, perUnit := (q[1][1]*c[0]-q[1][0]*c[1])/spread, (q[0][0]*c[1]-q[1][0]*c[0])/spread
		if fixed > 0 && perUnit > 0 {
			s.fixed, s.perUnit = fixed, perUnit
		}
	}
	s.fit.Store(uint64(math.Float32bits(float32(s.fixed)))<<32 | uint64(math.Float32bits(float32(s.perUnit/perTokens))))
}

// Fit is a measured speed: the time per token and the fixed time, in µs; 0: unknown.
type Fit struct{ PerToken, Fixed float32 }

// Fit returns the present speed.
func (s *Speed) Fit() Fit {
	fit := s.fit.Load()
	return Fit{PerToken: math.Float32frombits(uint32(fit)), Fixed: math.Float32frombits(uint32(fit >> 32))}
}

// Line is the result of the measurements in this process.
type Line struct {
	Samples int // measurements
	// Known: there are at least KnownAfter samples, and their sizes separate the two parts of the
	// time. Else the following fields are 0.
	Known     bool
	Bandwidth float64 // tokens per second, without SetUp
	SetUp     float64 // the fixed time, in µs
	// AtLeast: the time hardly grows with the tokens, so that Bandwidth is only a lower bound: the
	// measured time per token and two standard errors.
	AtLeast bool
}

// Line returns the result of the measurements until now.
func (s *Speed) Line() Line {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.line == nil {
		return Line{}
	}
	line, spread := Line{Samples: s.line.Count}, s.line.spread()
	if line.Samples < KnownAfter || spread == 0 {
		return line
	}
	q, c := &s.line.square, &s.line.cross
	fixed, perUnit := (q[1][1]*c[0]-q[1][0]*c[1])/spread, (q[0][0]*c[1]-q[1][0]*c[0])/spread
	variance := max(0, s.line.times-fixed*c[0]-perUnit*c[1]) / float64(min(line.Samples, memory)-2)
	deviation := math.Sqrt(variance * q[0][0] / spread)
	line.Known, line.SetUp = true, s.fixed
	if perUnit > 0 && deviation <= mostError*perUnit {
		line.Bandwidth = perTokens * 1e6 / s.perUnit
		return line
	}
	if line.AtLeast = true; perUnit <= 0 {
		line.SetUp = c[0] / q[0][0] // the mean
	}
	line.Bandwidth = perTokens * 1e6 / max(perUnit+2*deviation, 1e-3)
	return line
}

// spread returns the determinant of the first two features, or 0 if their values are too similar to
// separate the weights of the two.
func (r *Regression) spread() float64 {
	q := &r.square
	if spread := q[0][0]*q[1][1] - q[1][0]*q[1][0]; spread > leastSpread*leastSpread*q[1][0]*q[1][0] {
		return spread
	}
	return 0
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
