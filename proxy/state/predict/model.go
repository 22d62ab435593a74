// Package predict learns how long engines take for prompts and tokens, and predicts the
// time of a request at each candidate. Engines of one type (model, role, hardware) share
// one set of models. A model is a line through a few features, fitted by least squares
// with fading weights after each finished leg. The package does no I/O, has no clock and
// is safe for concurrent use.
//
// The decisions behind this package are in docs/design/placement.md.
package predict

import (
	"math"
	"sync"
	"sync/atomic"
)

// features is the number of features of a model. A model that uses fewer leaves the others
// at 0: their weights stay 0.
const features = 4

// Features describe one leg. Each value is of the order of 1 to 1000.
type Features [features]float64

const (
	// memory is the factor by which the weight of earlier samples shrinks with each sample.
	memory = 0.995
	// KnownAfter is the number of samples after which a model predicts.
	KnownAfter = 16
	// outlier bounds the ratio of a sample to its prediction, and its inverse. A sample
	// beyond it is moved to it, so that one stall changes little and a lasting change still has an effect.
	outlier = 4
	// A sample whose error is above usualErrors mean errors, and above leastError, counts
	// less: in proportion to its error.
	usualErrors = 2
	leastError  = 0.02
	// shortest is the least time in µs to which the error of a sample is related.
	shortest = 1000
	// longest is the most time in µs that a sample may have: a day.
	longest = 86400e6
	// errorMemory is the number of samples over which the error is averaged.
	errorMemory = 128
)

// fit is a fitted line. It never changes.
type fit struct {
	weights Features
	err     float64 // mean absolute error, as a share of the prediction
}

// Model is the line of one time in µs. Its zero value has no samples. It weights samples
// so that it minimizes relative errors, and has no negative weights: no feature makes
// engines faster.
type Model struct {
	fit atomic.Pointer[fit]

	mu     sync.Mutex
	count  int                         // guarded by mu
	square [features][features]float64 // sum of the products of features; guarded by mu
	cross  [features]float64           // sum of the products of features and times; guarded by mu
	err    float64                     // guarded by mu
}

// Learn adds a sample: work with features x took µs. said is what Predict returned for it,
// 0 if nothing.
// Samples that are not finite, not positive or longer than a day are ignored.
func (m *Model) Learn(x *Features, took, said float64) {
	if !(took > 0 && took < longest) {
		return
	}
	for _, v := range x {
		if !(v >= 0 && v < 1e12) {
			return
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	trust := 1.0
	if said > 0 {
		took = min(max(took, said/outlier), outlier*said)
		off := math.Abs(took-said) / said
		if usual := max(usualErrors*m.err, leastError); m.count > KnownAfter && off > usual {
			trust = usual / off
		}
		m.count = min(m.count, math.MaxInt32)
		m.err += (off - m.err) / float64(min(max(m.count-KnownAfter, 0)+1, errorMemory))
	}
	m.count++
	keep, scale := 1-(1-memory)*trust, trust/max(took, said, shortest)/max(took, said, shortest)
	for i := range x {
		for j := range i + 1 {
			m.square[i][j] = keep*m.square[i][j] + x[i]*x[j]*scale
		}
		m.cross[i] = keep*m.cross[i] + x[i]*took*scale
	}
	if m.count >= KnownAfter {
		m.fit.Store(&fit{weights: m.solve(), err: m.err})
	}
}

// Predict returns the expected time in µs of a leg with features x and its expected
// error; 0 without enough samples. It takes no lock.
func (m *Model) Predict(x *Features) (micros, err float64) {
	f := m.fit.Load()
	if f == nil {
		return 0, 0
	}
	return f.of(x), f.err
}

func (f *fit) of(x *Features) float64 {
	w := &f.weights
	return w[0]*x[0] + w[1]*x[1] + w[2]*x[2] + w[3]*x[3]
}

// Error returns the mean absolute error of predictions as a share of them.
func (m *Model) Error() (share float64, known bool) {
	f := m.fit.Load()
	if f == nil {
		return 0, false
	}
	return f.err, true
}

// solve returns the weights. A feature whose weight would be negative gets 0 and the
// others are fitted without it. m.mu is held.
func (m *Model) solve() Features {
	var out [features]bool
	for {
		w, ok := m.cholesky(&out)
		if !ok {
			return Features{}
		}
		worst, least := -1, 0.0
		for i, v := range w {
			if !out[i] && v*math.Sqrt(m.square[i][i]) < least {
				worst, least = i, v*math.Sqrt(m.square[i][i])
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
// the result is not finite. m.mu is held.
func (m *Model) cholesky(out *[features]bool) (w Features, ok bool) {
	var l [features][features]float64
	var z [features]float64
	for i := range features {
		if out[i] || m.square[i][i] < 1e-300 {
			continue
		}
		sum := m.cross[i]
		for j := range i {
			v := m.square[i][j]
			if l[j][j] == 0 {
				continue
			}
			for k := range j {
				v -= l[i][k] * l[j][k]
			}
			l[i][j] = v / l[j][j]
			sum -= l[i][j] * z[j]
		}
		d := m.square[i][i]
		for k := range i {
			d -= l[i][k] * l[i][k]
		}
		l[i][i] = math.Sqrt(max(d, 0) + ridge*m.square[i][i])
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
