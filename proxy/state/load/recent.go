package load

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// recentTime is after how long a placement weighs 1/e of a fresh one.
const recentTime = 10 * time.Minute

// recent is what was placed on a target of late, for its prompts to be computed.
// Reading takes no lock: it may see a placement a moment too early or too late.
type recent struct {
	mu       sync.Mutex    // of writing
	tokens   atomic.Uint64 // float64: uncached prompt tokens as of at
	requests atomic.Uint64 // float64
	at       atomic.Int64  // Unix time in ns; 0: never
}

func (r *recent) add(uncached int64, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	tokens, requests := r.read(now)
	r.tokens.Store(math.Float64bits(tokens + float64(uncached)))
	r.requests.Store(math.Float64bits(requests + 1))
	r.at.Store(now.UnixNano())
}

func (r *recent) read(now time.Time) (tokens, requests float64) {
	at := r.at.Load()
	if at == 0 {
		return 0, 0
	}
	weight := math.Exp(-float64(max(0, now.UnixNano()-at)) / float64(recentTime))
	return weight * math.Float64frombits(r.tokens.Load()), weight * math.Float64frombits(r.requests.Load())
}

// Placed notes that a request was placed on the target, which has so many tokens
// of its prompt to compute.
func (c *Counter) Placed(uncached int64, now time.Time) { c.recent.add(uncached, now) }

// Recent is the uncached prompt tokens, and the requests, that were placed on the
// target of late, each placement weighing less the longer it is ago. It takes no
// lock.
func (c *Counter) Recent(now time.Time) (tokens, requests float32) {
	t, n := c.recent.read(now)
	return float32(t), float32(n)
}
