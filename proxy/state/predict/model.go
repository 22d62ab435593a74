// Package predict learns how long engines take for prompts and tokens, and predicts the
// time of a request at each candidate. Engines of one type (model, role, hardware) share
// one set of models. A model is a line through a few features, fitted after each finished
// leg. The package does no I/O, has no clock and is safe for concurrent use.
//
// The decisions behind this package are in docs/design/placement.md.
package predict

import (
	"sync"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// Features describe one leg.
type Features = load.Features

const (
	// longest is the most time in µs that a leg may take: a day.
	longest = 86400e6
	// memory is the number of recent samples from which a model is computed. A model has more weights
	// than a speed, and its engines' work changes less than a network's.
	memory = 200
	// errorMemory is the number of samples over which an error is averaged.
	errorMemory = 128
)

// fit is a fitted line. It never changes.
type fit struct {
	weights Features
	err     float64 // mean absolute error, as a share of the prediction
}

// Model is the line of one time in µs. Its zero value has no samples. It predicts after
// load.KnownAfter samples.
type Model struct {
	fit atomic.Pointer[fit]

	mu   sync.Mutex
	line load.Regression // guarded by mu
}

// Learn adds a sample: work with features x took µs. said is what Predict returned for it,
// 0 if nothing.
// Samples that are not finite, not positive or longer than a day are ignored.
func (m *Model) Learn(x *Features, took, said float64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.line.Learn(x, took, said, memory) && m.line.Count >= load.KnownAfter {
		m.fit.Store(&fit{weights: m.line.Weights([len(x)]bool{}), err: m.line.Error})
	}
}

// Predict returns the expected time in µs of a leg with features x and its expected
// error; 0 without enough samples. It takes no lock.
func (m *Model) Predict(x *Features) (micros, err float64) {
	f := m.fit.Load()
	if f == nil {
		return 0, 0
	}
	return f.weights.Of(x), f.err
}

// Error returns the mean absolute error of predictions as a share of them.
func (m *Model) Error() (share float64, known bool) {
	f := m.fit.Load()
	if f == nil {
		return 0, false
	}
	return f.err, true
}
