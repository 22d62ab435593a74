package proxy

import (
	"context"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/balance"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/inflight"
)

// liveSet is the exchanges that run now. Safe for concurrent use.
type liveSet struct {
	mu      sync.Mutex
	views   []*liveView // guarded by mu; in no order
	running inflight.Group
	shown   *balance.Worker // learns of each; nil: nobody needs to know
}

// liveView is what others may see of a running exchange: while it is in the set
// it never changes but for the placement, which is replaced as a whole.
type liveView struct {
	requestID string
	start     time.Time
	placed    atomic.Pointer[coordinator.Placement]
	place     int // guarded by the set's mu; in views, counted from 1, 0: not there
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
	l.views = append(l.views, v)
	v.place = len(l.views)
	l.running.Add()
	l.shown.Exchange(1)
}

func (l *liveSet) remove(v *liveView) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if v.place == 0 {
		return
	}
	end := len(l.views) - 1
	last := l.views[end]
	l.views[v.place-1], last.place = last, v.place
	l.views[end], v.place = nil, 0
	l.views = l.views[:end]
	l.shown.Exchange(-1)
	l.running.Done()
}

// wait returns when no exchange runs, or ctx has ended.
func (l *liveSet) wait(ctx context.Context) {
	select {
	case <-l.running.Idle():
	case <-ctx.Done():
	}
}

// list returns the running exchanges, oldest first.
func (l *liveSet) list(now time.Time) []LiveExchange {
	l.mu.Lock()
	rows := make([]LiveExchange, 0, len(l.views))
	for _, v := range l.views {
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
	return len(l.views)
}
