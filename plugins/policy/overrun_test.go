package policy

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/plugins/policy/policytest"
)

// BenchmarkOverrun measures how long a request waits for a policy that loops or
// exhausts its memory, with a budget of 5 ms, while other goroutines use the
// processors. The case "timer" is a goroutine that waits for a timer of 5 ms
// and runs no policy. It shows the part of the wait that is scheduling.
func BenchmarkOverrun(b *testing.B) {
	const limit = 5 * time.Millisecond
	for _, busy := range []int{0, 2, 4} {
		for _, do := range []string{"timer", "loop", "grow"} {
			b.Run(fmt.Sprintf("%s/busy=%d", do, busy), func(b *testing.B) {
				l := newLoading()
				l.Load.Guarded = true
				l.Load.MemoryPages = 1024
				l.Budget = limit
				place := hook(b, l.load(b), abi.HookPlace)
				stop := keepBusy(busy)
				defer stop()
				var waits []time.Duration
				for b.Loop() {
					began := time.Now()
					if do == "timer" {
						<-time.NewTimer(limit).C
					} else {
						place.Place(policytest.Pair(do))
					}
					waits = append(waits, time.Since(began))
				}
				slices.Sort(waits)
				var sum time.Duration
				for _, w := range waits {
					sum += w
				}
				b.ReportMetric(float64(sum)/float64(len(waits))/1e6, "mean-ms")
				b.ReportMetric(float64(waits[len(waits)/2])/1e6, "p50-ms")
				b.ReportMetric(float64(waits[len(waits)*99/100])/1e6, "p99-ms")
			})
		}
	}
}

// keepBusy starts n goroutines that use processors until stop is called.
func keepBusy(n int) (stop func()) {
	var group sync.WaitGroup
	var over atomic.Bool
	for range n {
		group.Go(func() {
			for !over.Load() {
			}
		})
	}
	return func() { over.Store(true); group.Wait() }
}
