package journal

import (
	"context"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/balance"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
)

// Running is the set of requests that run now. It is safe for concurrent use.
type Running struct {
	mu     sync.Mutex
	views  []*view         // unordered; guarded by mu
	idle   chan struct{}   // closed when views becomes empty; nil: no goroutine waits; guarded by mu
	worker *balance.Worker // receives the number of running requests; nil: no other process needs the number
}

// view is the part of a running request that other goroutines may read. While the view is
// in the set, only the placement changes, and always as a whole.
type view struct {
	requestID string
	start     time.Time
	placed    atomic.Pointer[coordinator.Placement]
	place     int // in views, counted from 1; 0: not in the set; guarded by the set's mu
}

// RunningRow is one row of GET /v1/exchanges.
type RunningRow struct {
	RequestID string  `json:"request_id"`
	AgeMS     float64 `json:"age_ms"`
	Flow      string  `json:"flow"`
	Prefill   string  `json:"prefill"`
	Decode    string  `json:"decode"`
}

func (r *Running) add(v *view) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.views = append(r.views, v)
	v.place = len(r.views)
	r.worker.Exchange(1)
}

func (r *Running) remove(v *view) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if v.place == 0 {
		return
	}
	end := len(r.views) - 1
	last := r.views[end]
	r.views[v.place-1], last.place = last, v.place
	r.views[end], v.place = nil, 0
	r.views = r.views[:end]
	r.worker.Exchange(-1)
	if end == 0 && r.idle != nil {
		close(r.idle)
		r.idle = nil
	}
}

// Wait returns when no request runs, or when ctx ends.
func (r *Running) Wait(ctx context.Context) {
	r.mu.Lock()
	if len(r.views) == 0 {
		r.mu.Unlock()
		return
	}
	if r.idle == nil {
		r.idle = make(chan struct{})
	}
	idle := r.idle
	r.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
	}
}

// List returns the running requests, oldest first.
func (r *Running) List(now time.Time) []RunningRow {
	r.mu.Lock()
	rows := make([]RunningRow, 0, len(r.views))
	for _, v := range r.views {
		row := RunningRow{RequestID: v.requestID, AgeMS: millis(now.Sub(v.start))}
		if p := v.placed.Load(); p != nil {
			row.Flow, row.Prefill, row.Decode = p.Flow.String(), p.Prefill.Name(), p.Decode.Name()
		}
		rows = append(rows, row)
	}
	r.mu.Unlock()
	sort.Slice(rows, func(i, j int) bool { return rows[i].AgeMS > rows[j].AgeMS })
	return rows
}

// Len returns how many requests run.
func (r *Running) Len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.views)
}
