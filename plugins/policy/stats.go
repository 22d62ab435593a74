package policy

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// Calls counts the calls of one policy by their duration: bucket i holds those
// below 2^i ns. It is safe for concurrent use; the zero value is empty.
type Calls struct {
	sum      atomic.Int64 // ns
	failures atomic.Uint64
	buckets  [36]atomic.Uint64
}

// Summary holds the figures of Calls.
type Summary struct {
	Calls, Failures uint64
	MeanUS, P99US   float64 // P99US is the upper bound of its bucket
}

// Observe counts one call.
func (c *Calls) Observe(d time.Duration) {
	ns := max(int64(d), 0)
	c.sum.Add(ns)
	c.buckets[min(bits.Len64(uint64(ns)), len(c.buckets)-1)].Add(1)
}

// Fail counts one call as failed, whether or not Observe counted it.
func (c *Calls) Fail() { c.failures.Add(1) }

// Summary returns the figures so far.
func (c *Calls) Summary() Summary {
	s := Summary{Failures: c.failures.Load()}
	var counts [len(c.buckets)]uint64
	for i := range c.buckets {
		counts[i] = c.buckets[i].Load()
		s.Calls += counts[i]
	}
	if s.Calls == 0 {
		return s
	}
	s.MeanUS = float64(c.sum.Load()) / float64(s.Calls) / 1000
	var below uint64
	for i, n := range counts {
		if below += n; below*100 >= s.Calls*99 {
			s.P99US = float64(uint64(1)<<i) / 1000
			break
		}
	}
	return s
}
