package admission

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestAdmissionForgetsTheRefused: a refused request does not count as an open request of
// its client.
func TestAdmissionForgetsTheRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a Queue
		l := config.Limits{MaxExchanges: 1, Queue: 1, QueueTimeout: config.Duration(time.Second), PerClient: 2}
		leave := mustEnter(t, &a, "a", l)
		late := make(chan error)
		go func() {
			_, err := a.enter(t.Context(), "b", l)
			late <- err
		}()
		synctest.Wait()
		for range 3 * l.PerClient {
			if _, err := a.enter(t.Context(), "c", l); !errors.Is(err, ErrQueueFull) {
				t.Errorf("with the queue full: %v", err)
			}
		}
		if err := <-late; !errors.Is(err, ErrQueueTimeout) {
			t.Errorf("error after the time limit of the queue: %v, want ErrQueueTimeout", err)
		}
		leave()
		a.empty(t)
	})
}

// leavingContext is the context of a client that leaves. It calls the function before it
// reports the end.
type leavingContext struct {
	context.Context
	gone <-chan struct{}
	run  func()
}

func (c leavingContext) Done() <-chan struct{} { return c.gone }

func (c leavingContext) Err() error {
	c.run()
	return context.Canceled
}

// TestAdmissionAtTheMomentOfLeaving: a place becomes free after the client has left and
// before its ticket has left the queue. This place is not lost.
func TestAdmissionAtTheMomentOfLeaving(t *testing.T) {
	var a Queue
	gone := make(chan struct{})
	close(gone)
	first := mustEnter(t, &a, "a", limits(1))
	leave, err := a.enter(leavingContext{context.Background(), gone, sync.OnceFunc(first)}, "b", limits(1))
	if err != nil {
		t.Fatalf("got error %v, want the place that the first request returned", err)
	}
	leave()
	a.empty(t)
}

// TestAdmissionCountsWaiting: an admitted request no longer counts as waiting. So its
// client may queue further requests, one after another.
func TestAdmissionCountsWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a Queue
		l := config.Limits{MaxExchanges: 1, Queue: 4, QueueTimeout: config.Duration(time.Second), PerClient: 3}
		leave := mustEnter(t, &a, "b", l)
		for range 3 * l.PerClient {
			next := make(chan func(), 1)
			go func() {
				leave, err := a.enter(t.Context(), "b", l)
				if err != nil {
					t.Error(err)
				}
				next <- leave
			}()
			synctest.Wait()
			leave()
			if leave = <-next; leave == nil {
				return
			}
		}
		leave()
		a.empty(t)
	})
}
