package admission

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/downstream"
)

// TestWaitingRoomOrder: in each line only the first request tries for a place. The
// requests have the order of arrival, and the line of one model does not delay the lines
// of other models.
func TestWaitingRoomOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var room WaitingRoom
		ready := make(chan struct{})
		var order []int
		tries := 0
		for i := range 50 {
			seat := room.Join("llama")
			go func() {
				defer seat.Leave()
				if err := seat.Turn(t.Context()); err != nil {
					t.Error(err)
				}
				if err := seat.Pause(t.Context(), ready); err != nil {
					t.Error(err)
				}
				tries++ // one goroutine at a time: the race detector checks it
				order = append(order, i)
			}()
		}
		other := room.Join("qwen")
		if err := other.Turn(t.Context()); err != nil {
			t.Errorf("the first of another line: %v", err)
		}
		other.Leave()
		synctest.Wait()
		if len(order) > 0 || !room.Occupied("llama") || room.Occupied("qwen") {
			t.Fatalf("%v left before an engine was ready", order)
		}
		close(ready)
		synctest.Wait()
		if tries != 50 || !slices.IsSorted(order) {
			t.Errorf("%d tries in the order %v", tries, order)
		}
		if room.Occupied("llama") || len(room.lines) > 0 {
			t.Errorf("the empty room holds %d lines", len(room.lines))
		}
	})
}

// TestWaitingRoomEnds lists the events that end a wait.
func TestWaitingRoomEnds(t *testing.T) {
	for _, tt := range []struct {
		name string
		end  func(*WaitingRoom, context.CancelCauseFunc)
		want error
		at   time.Duration
	}{
		{"the client leaves", func(_ *WaitingRoom, cancel context.CancelCauseFunc) { cancel(context.Canceled) }, context.Canceled, time.Minute},
		{"the proxy drains", func(room *WaitingRoom, _ context.CancelCauseFunc) { room.Close(); room.Close() }, downstream.ErrDraining, time.Minute},
		{"the time is over", func(*WaitingRoom, context.CancelCauseFunc) {}, ErrNoEngineTimeout, time.Hour},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var room WaitingRoom
				outer, cancel := context.WithCancelCause(t.Context())
				ctx, stop := context.WithTimeoutCause(outer, time.Hour, ErrNoEngineTimeout)
				defer stop()
				began := time.Now()
				ended := make(chan error, 2)
				for range 2 { // the first request, which tries repeatedly, and one behind it
					seat := room.Join("llama")
					go func() {
						defer seat.Leave()
						err := seat.Turn(ctx)
						for err == nil {
							err = seat.Pause(ctx, nil)
						}
						ended <- err
					}()
				}
				time.AfterFunc(time.Minute, func() { tt.end(&room, cancel) })
				for range 2 {
					if err := <-ended; !errors.Is(err, tt.want) {
						t.Errorf("the wait ended with %v, want %v", err, tt.want)
					}
				}
				if took := time.Since(began); took != tt.at {
					t.Errorf("the wait ended after %v, want %v", took, tt.at)
				}
				synctest.Wait()
				if room.Occupied("llama") {
					t.Error("a seat is left")
				}
				cancel(nil)
			})
		})
	}
}

// TestWaitingRoomMiddleLeaves: if a request leaves from the middle of a line, no other
// request wakes.
func TestWaitingRoomMiddleLeaves(t *testing.T) {
	var room WaitingRoom
	a, b, c := room.Join("m"), room.Join("m"), room.Join("m")
	b.Leave()
	select {
	case <-c.first:
		t.Fatal("the third request is first in the line although the first one waits")
	default:
	}
	a.Leave()
	if err := c.Turn(t.Context()); err != nil {
		t.Error(err)
	}
	c.Leave()
}
