// Package usage measures what a test or a benchmark uses: CPU time and heap.
package usage

import (
	"runtime"
	"slices"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/internal/plot"
)

// ProcessTime returns the CPU time of this process. A busy machine distorts it less than wall-clock
// time.
func ProcessTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // cannot fail
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Heap returns the reachable bytes of the heap, without the memory that pools keep.
func Heap() int64 {
	runtime.GC() // the second run frees the content of pools
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// QuantileMicros sorts times and returns a quantile of them in µs. There is at least one time.
func QuantileMicros(times []time.Duration, q float64) float64 {
	slices.Sort(times)
	return float64(plot.Quantile(times, q).Nanoseconds()) / 1e3
}
