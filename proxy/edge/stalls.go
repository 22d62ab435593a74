package edge

import (
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
