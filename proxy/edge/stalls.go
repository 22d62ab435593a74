package edge

import (
	"context"
	"sync/atomic"
	"time"
)

// stallWatch is a coarse clock that limits how long a client can make the proxy wait. A
// connection notes the tick at which a wait began, and cutStalled closes the connections
// that have waited for too long. So a read or a write costs two stores and no timer.
type stallWatch struct{ tick atomic.Int64 }

// waiting is the begin of a wait, in ticks of a stallWatch; 0: there is no wait.
type waiting struct{ since atomic.Int64 }

func (w *waiting) begin(watch *stallWatch) { w.since.Store(watch.tick.Load()) }

func (w *waiting) end() { w.since.Store(0) }

// Bounds of the time between two ticks.
const (
	tickLeast = 5 * time.Millisecond
	tickMost  = time.Second
)

// stallLimits are the longest times that a client can make the proxy wait.
type stallLimits struct {
	head  time.Duration // for the head of a request over HTTP/2
	write time.Duration // in one write to a TCP connection
}

// cutStalled closes the TCP connections whose client exceeds a limit, until ctx ends. A
// connection closes at most two ticks late. A tick is an eighth of the shorter limit, but
// at most a second.
func (c *connections) cutStalled(ctx context.Context, limits stallLimits) {
	period := min(max(min(limits.head, limits.write)/8, tickLeast), tickMost)
	ticks := func(limit time.Duration) int64 { return int64((limit+period-1)/period) + 1 }
	heads, writes := ticks(limits.head), ticks(limits.write)
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		now := c.watch.tick.Add(1)
		for _, t := range c.stalled(now-heads, now-writes) {
			t.abort()
		}
	}
}

// stalled returns the connections that have waited for a head, or in a write, since
// these ticks or earlier.
func (c *connections) stalled(head, write int64) (late []*tcpConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for t := range c.tcp {
		h, w := t.head.since.Load(), t.writing.since.Load()
		if h > 0 && h <= head || w > 0 && w <= write {
			late = append(late, t)
		}
	}
	return late
}
