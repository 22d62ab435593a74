package telemetry

import (
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// intervalBuckets is the number of buckets: bucket i holds waits below 2^i ms, the last
// one all longer waits.
const intervalBuckets = 16

// Intervals counts the waits between events of one stream, without a lock or an
// allocation. The zero value is ready for use. One goroutine owns it, and merges it
// once at the end of the stream.
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

// intervalHistogram is the Prometheus histogram of all merged Intervals.
type intervalHistogram struct {
	desc   *prometheus.Desc
	counts [intervalBuckets]atomic.Uint64
	sum    atomic.Int64 // nanoseconds
}

func newIntervalHistogram(name, help string) *intervalHistogram {
	return &intervalHistogram{desc: prometheus.NewDesc(name, help, nil, nil)}
}

func (h *intervalHistogram) merge(i *Intervals) {
	for b, n := range i.counts {
		if n > 0 {
			h.counts[b].Add(uint64(n))
		}
	}
	h.sum.Add(int64(i.sum))
}

// Describe implements prometheus.Collector.
func (h *intervalHistogram) Describe(ch chan<- *prometheus.Desc) { ch <- h.desc }

// Collect implements prometheus.Collector.
func (h *intervalHistogram) Collect(ch chan<- prometheus.Metric) {
	buckets := make(map[float64]uint64, intervalBuckets-1)
	var total uint64
	for b := range h.counts {
		total += h.counts[b].Load()
		if b < intervalBuckets-1 {
			buckets[float64(uint64(1)<<b)/1000] = total
		}
	}
	ch <- prometheus.MustNewConstHistogram(h.desc, total, time.Duration(h.sum.Load()).Seconds(), buckets)
}
