package load

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// After recentTime, the weight of a placement is 1/e. For the target's utilisation this
// time is busyTime.
const (
	recentTime = 10 * time.Minute
	busyTime   = time.Minute
)

// recent sums up the latest placements of prompts on a target. Reading takes no lock, so
// it may see a placement slightly too early or too late.
type recent struct {
	mu       sync.Mutex    // of writing
	tokens   atomic.Uint64 // float64: uncached prompt tokens as of at
	requests atomic.Uint64 // float64
	work     atomic.Uint64 // a float64: recent work in tokens, which decays with busyTime
	at       atomic.Int64  // Unix time in ns; 0: never
}

func (r *recent) add(uncached int64, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	tokens, requests, work := r.read(now)
	r.tokens.Store(math.Float64bits(tokens + float64(uncached)))
	r.requests.Store(math.Float64bits(requests + 1))
	r.work.Store(math.Float64bits(work + float64(uncached)))
	r.at.Store(now.UnixNano())
}

// follow sets the values to another process's.
func (r *recent) follow(tokens, requests, work float64, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tokens.Store(math.Float64bits(tokens))
	r.requests.Store(math.Float64bits(requests))
	r.work.Store(math.Float64bits(work))
	r.at.Store(now.UnixNano())
}

func (r *recent) read(now time.Time) (tokens, requests, work float64) {
	at := r.at.Load()
	if at == 0 {
		return 0, 0, 0
	}
	ago := float64(max(0, now.UnixNano()-at))
	weight, fresh := math.Exp(-ago/float64(recentTime)), math.Exp(-ago/float64(busyTime))
	return weight * math.Float64frombits(r.tokens.Load()), weight * math.Float64frombits(r.requests.Load()),
		fresh * math.Float64frombits(r.work.Load())
}

// Placed notes that a request was placed on the target, and the number of prompt tokens
// to compute.
func (c *Counter) Placed(uncached int64, now time.Time) { c.recent.add(uncached, now) }

// Recent is the uncached prompt tokens, and the requests, that were placed on the
// target of late, each placement weighing less the longer it is ago; and about
// the share of the last minute that it takes to compute them, at the speed that
// Prefill has measured (0 before). It takes no lock.
func (c *Counter) Recent(now time.Time) (tokens, requests, busy float32) {
	t, n, work := c.recent.read(now)
	return float32(t), float32(n), float32(work * float64(c.Prefill.PerToken()) / float64(busyTime/time.Microsecond))
}
