package admission

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// ErrNoEngineTimeout reports that no engine became ready within limits.no_engine_timeout. Its code
// is the reason of pdproxy_shed_total.
var ErrNoEngineTimeout = openai.NewError(openai.CodeNoEngineTimeout, "no engine became ready for the request in time")

// ErrHeld reports that the plan policy held a request until the limit of the wait. Its code is
// the reason of pdproxy_shed_total.
var ErrHeld = openai.NewError(openai.CodeHeldByPolicy, "the plan policy held the request until the limit of the wait")

// retryEvery is the interval at which the first request of a line tries again although the
// engines have not changed: an engine's circuit may have closed, and in a fleet the
// coordinator may know more than this process.
const retryEvery = time.Second

// WaitingRoom holds requests for models whose engines are away. The requests of one model
// wait in line, in order of arrival. Only the first in line tries whether an engine takes
// it, and the next one tries when the first has left. The requests keep their places
// among limits.max_exchanges, so these limits bound the room, too. The zero value is
// empty. Safe for concurrent use.
type WaitingRoom struct {
	waiting atomic.Int64 // seats in all lines

	mu     sync.Mutex
	lines  map[string][]*Seat // by model, in order of arrival; no line is empty; guarded by mu
	closed chan struct{}      // nil: not made yet; guarded by mu
	shut   bool               // guarded by mu
}

// Seat is the place of one request in a line.
type Seat struct {
	room  *WaitingRoom
	model string
	first chan struct{} // closed when the seat is the first of its line
	shut  chan struct{} // closed when the room closes
}

// Len returns how many requests wait.
func (w *WaitingRoom) Len() int { return int(w.waiting.Load()) }

// Occupied reports whether a request waits for the model. A new request then joins the
// line, so that it does not overtake.
func (w *WaitingRoom) Occupied(model string) bool {
	if w.waiting.Load() == 0 {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.lines[model]) > 0
}

// Join puts a request at the end of the model's line. The caller calls Leave exactly
// once.
func (w *WaitingRoom) Join(model string) *Seat {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.lines == nil {
		w.lines = make(map[string][]*Seat)
	}
	s := &Seat{room: w, model: model, first: make(chan struct{}), shut: w.closing()}
	w.lines[model] = append(w.lines[model], s)
	if len(w.lines[model]) == 1 {
		close(s.first)
	}
	w.waiting.Add(1)
	return s
}

// Close makes all waits end with downstream.ErrDraining, now and later.
func (w *WaitingRoom) Close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.shut {
		w.shut = true
		close(w.closing())
	}
}

// closing returns the channel that Close closes. The caller holds mu.
func (w *WaitingRoom) closing() chan struct{} {
	if w.closed == nil {
		w.closed = make(chan struct{})
	}
	return w.closed
}

// Turn waits until the request is the first of its line. The error is downstream.ErrDraining
// or the cause of ctx.
func (s *Seat) Turn(ctx context.Context) error {
	select {
	case <-s.first:
		return ended(ctx, s.shut)
	default:
	}
	select {
	case <-s.first:
	case <-s.shut:
	case <-ctx.Done():
	}
	return ended(ctx, s.shut)
}

// Pause waits until changed is closed, or for retryEvery. The error is
// downstream.ErrDraining or the cause of ctx.
func (s *Seat) Pause(ctx context.Context, changed <-chan struct{}) error {
	return pause(ctx, changed, retryEvery, s.shut)
}

// Pause waits until changed is closed, or for the interval, without a place in a line. The
// error is downstream.ErrDraining or the cause of ctx.
func (w *WaitingRoom) Pause(ctx context.Context, changed <-chan struct{}, interval time.Duration) error {
	w.mu.Lock()
	shut := w.closing()
	w.mu.Unlock()
	return pause(ctx, changed, interval, shut)
}

func pause(ctx context.Context, changed <-chan struct{}, interval time.Duration, shut <-chan struct{}) error {
	timer := time.NewTimer(interval)
	defer timer.Stop()
	select {
	case <-changed:
	case <-timer.C:
	case <-shut:
	case <-ctx.Done():
	}
	return ended(ctx, shut)
}

// ended returns why a request must not wait further, or nil.
func ended(ctx context.Context, shut <-chan struct{}) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	select {
	case <-shut:
		return downstream.ErrDraining
	default:
		return nil
	}
}

// Leave frees the place. The next request of the line is then the first.
func (s *Seat) Leave() {
	w := s.room
	w.mu.Lock()
	defer w.mu.Unlock()
	line := w.lines[s.model]
	at := slices.Index(line, s)
	line = slices.Delete(line, at, at+1)
	w.waiting.Add(-1)
	switch {
	case len(line) == 0:
		delete(w.lines, s.model)
		return
	case at == 0:
		close(line[0].first)
	}
	w.lines[s.model] = line
}
