package proxy

import (
	"context"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator"
)

// liveSet is the exchanges that run now. Safe for concurrent use.
type liveSet struct {
	mu  sync.Mutex
	set map[*liveView]struct{} // guarded by mu
	end chan struct{}          // guarded by mu; closed when the last one has gone, if somebody waits
}

// liveView is what others may see of a running exchange: while it is in the set
// it never changes but for the placement, which is replaced as a whole.
type liveView struct {
	requestID string
	start     time.Time
	placed    atomic.Pointer[coordinator.Placement]
}

// LiveExchange is one row of GET /v1/exchanges.
type LiveExchange struct {
	RequestID string  `json:"request_id"`
	AgeMS     float64 `json:"age_ms"`
	Flow      string  `json:"flow"`
	Prefill   string  `json:"prefill"`
	Decode    string  `json:"decode"`
}

func (l *liveSet) add(v *liveView) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.set == nil {
		l.set = make(map[*liveView]struct{})
	}
	l.set[v] = struct{}{}
}

func (l *liveSet) remove(v *liveView) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.set, v)
	if len(l.set) == 0 && l.end != nil {
		close(l.end)
		l.end = nil
	}
}

// wait returns when no exchange runs, or ctx has ended. One at a time may wait.
func (l *liveSet) wait(ctx context.Context) {
	l.mu.Lock()
	if len(l.set) == 0 {
		l.mu.Unlock()
		return
	}
	end := make(chan struct{})
	l.end = end
	l.mu.Unlock()
	select {
	case <-end:
	case <-ctx.Done():
	}
}

// list returns the running exchanges, oldest first.
func (l *liveSet) list(now time.Time) []LiveExchange {
	l.mu.Lock()
	rows := make([]LiveExchange, 0, len(l.set))
	for v := range l.set {
		row := LiveExchange{RequestID: v.requestID, AgeMS: millis(now.Sub(v.start))}
		if p := v.placed.Load(); p != nil {
			row.Flow, row.Prefill, row.Decode = p.Flow.String(), p.Prefill.Name(), p.Decode.Name()
		}
		rows = append(rows, row)
	}
	l.mu.Unlock()
	sort.Slice(rows, func(i, j int) bool { return rows[i].AgeMS > rows[j].AgeMS })
	return rows
}

func (l *liveSet) len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.set)
}
