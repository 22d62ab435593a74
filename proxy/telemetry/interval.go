package telemetry

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// intervalBuckets is the number of buckets: bucket i holds waits below 2^i ms, the last
// one all longer waits.
const intervalBuckets = 16

// Intervals counts the waits between events of one stream, without a lock or an
// allocation. The zero value is ready for use. One goroutine owns it. Model.Ended merges it.
type Intervals struct {
	counts [intervalBuckets]uint32
	sum    time.Duration
}

// Observe counts one wait.
func (i *Intervals) Observe(d time.Duration) {
	b := min(bits.Len64(uint64(max(d, 0)/time.Millisecond)), intervalBuckets-1)
	i.counts[b]++
	i.sum += d
}

// Count returns the number of waits.
func (i *Intervals) Count() (n int64) {
	for _, c := range i.counts {
		n += int64(c)
	}
	return n
}

// intervalHistogram is the sum of merged Intervals.
type intervalHistogram struct {
	counts [intervalBuckets]atomic.Uint64
	sum    atomic.Int64 // nanoseconds
}

// intervalVec is the Prometheus histogram of merged Intervals with one label. It is safe
// for concurrent use.
type intervalVec struct {
	desc *prometheus.Desc

	mu      sync.Mutex
	byLabel map[string]*intervalHistogram // guarded by mu
}

func newIntervalVec(name, help, label string) *intervalVec {
	return &intervalVec{desc: prometheus.NewDesc(name, help, []string{label}, nil), byLabel: make(map[string]*intervalHistogram)}
}

// with returns the histogram with that value of the label.
func (v *intervalVec) with(label string) *intervalHistogram {
	v.mu.Lock()
	defer v.mu.Unlock()
	h := v.byLabel[label]
	if h == nil {
		h = new(intervalHistogram)
		v.byLabel[label] = h
	}
	return h
}

// remove removes the histogram with that value of the label.
func (v *intervalVec) remove(label string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.byLabel, label)
}

// Describe implements prometheus.Collector.
func (v *intervalVec) Describe(ch chan<- *prometheus.Desc) { ch <- v.desc }

// Collect implements prometheus.Collector.
func (v *intervalVec) Collect(ch chan<- prometheus.Metric) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for label, h := range v.byLabel {
		ch <- h.metric(v.desc, label)
	}
}

// buckets returns the sum of all histograms.
func (v *intervalVec) buckets() (b Buckets) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.byLabel) == 0 {
		return b
	}
	b = Buckets{Bounds: make([]float64, intervalBuckets-1), Counts: make([]uint64, intervalBuckets)}
	for i := range b.Bounds {
		b.Bounds[i] = intervalBound(i)
	}
	for _, h := range v.byLabel {
		var total uint64
		for i := range h.counts {
			total += h.counts[i].Load()
			b.Counts[i] += total
		}
	}
	return b
}

// intervalBound returns the upper bound of a bucket, in seconds.
func intervalBound(bucket int) float64 { return float64(uint64(1)<<bucket) / 1000 }

func (h *intervalHistogram) metric(desc *prometheus.Desc, label string) prometheus.Metric {
	buckets := make(map[float64]uint64, intervalBuckets-1)
	var total uint64
	for b := range h.counts {
		total += h.counts[b].Load()
		if b < intervalBuckets-1 {
			buckets[intervalBound(b)] = total
		}
	}
	return prometheus.MustNewConstHistogram(desc, total, time.Duration(h.sum.Load()).Seconds(), buckets, label)
}
