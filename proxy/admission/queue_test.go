package admission

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
)

// limits returns the limits of these tests: the given number of running requests, a queue
// of ten, and a wait of ten seconds.
func limits(places int) config.Limits {
	return config.Limits{MaxExchanges: places, Queue: 10, QueueTimeout: config.Duration(10 * time.Second)}
}

// empty checks that no request runs or waits.
func (a *Queue) empty(t *testing.T) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.running != 0 || a.order.waiting != 0 || len(a.clients) != 0 {
		t.Errorf("%d run, %d wait, clients %v", a.running, a.order.waiting, a.clients)
	}
	for _, c := range a.order.classes {
		if c.running != 0 || c.waiting != 0 || len(c.active) != 0 {
			t.Errorf("class %q: %d run, %d wait for %d tenants", c.Name, c.running, c.waiting, len(c.active))
		}
	}
}

// claim returns the claim of a client's request without a class.
func claim(client string) Claim {
	cfg := config.Default()
	class, _ := cfg.PriorityClass("")
	return Claim{Client: client, Class: class}
}

// enter is Enter for a request without a class.
func (a *Queue) enter(ctx context.Context, client string, l config.Limits) (leave func(), err error) {
	p, err := a.Enter(ctx, claim(client), l)
	return func() { p.Leave(0) }, err
}

func mustEnter(t *testing.T, a *Queue, client string, l config.Limits) (leave func()) {
	t.Helper()
	leave, err := a.enter(t.Context(), client, l)
	if err != nil {
		t.Fatal(err)
	}
	return leave
}

func TestAdmissionInOrderOfArrival(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a Queue
		leave := mustEnter(t, &a, "a", limits(1))
		order := make(chan int, 5)
		for i := range 5 {
			go func() {
				leave, err := a.enter(t.Context(), "b", limits(1))
				if err != nil {
					t.Error(err)
					return
				}
				order <- i
				leave()
			}()
			synctest.Wait()
		}
		if n := a.Waiting(); n != 5 {
			t.Errorf("%d wait", n)
		}
		leave()
		for want := range 5 {
			if got := <-order; got != want {
				t.Errorf("number %d was admitted in place of %d", got, want)
			}
		}
		synctest.Wait()
		a.empty(t)
	})
}

func TestAdmissionRefuses(t *testing.T) {
	errLeft := errors.New("left")
	tests := []struct {
		name   string
		limits config.Limits
		run    func(ctx context.Context, a *Queue, l config.Limits) error
		want   error
		after  time.Duration
		reason string
	}{
		{"queue is full", config.Limits{MaxExchanges: 1}, func(ctx context.Context, a *Queue, l config.Limits) error {
			_, err := a.enter(ctx, "b", l)
			return err
		}, ErrQueueFull, 0, "queue_full"},
		{"time is up", limits(1), func(ctx context.Context, a *Queue, l config.Limits) error {
			_, err := a.enter(ctx, "b", l)
			return err
		}, ErrQueueTimeout, 10 * time.Second, "queue_timeout"},
		{"client leaves", limits(1), func(ctx context.Context, a *Queue, l config.Limits) error {
			ctx, cancel := context.WithCancelCause(ctx)
			time.AfterFunc(3*time.Second, func() { cancel(errLeft) })
			_, err := a.enter(ctx, "b", l)
			return err
		}, errLeft, 3 * time.Second, "left"},
		{"proxy drains", limits(1), func(ctx context.Context, a *Queue, l config.Limits) error {
			ctx, cancel := context.WithCancelCause(ctx)
			cancel(downstream.ErrDraining)
			_, err := a.enter(ctx, "b", l)
			return err
		}, downstream.ErrDraining, 0, "draining"},
		{"client has its share", config.Limits{MaxExchanges: 2, PerClient: 1}, func(ctx context.Context, a *Queue, l config.Limits) error {
			_, err := a.enter(ctx, "a", l)
			return err
		}, ErrClientLimit, 0, "client_limit"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var a Queue
				leave := mustEnter(t, &a, "a", tt.limits)
				begin := time.Now()
				err := tt.run(t.Context(), &a, tt.limits)
				if !errors.Is(err, tt.want) || time.Since(begin) != tt.after {
					t.Errorf("got %v after %v, want %v after %v", err, time.Since(begin), tt.want, tt.after)
				}
				if r := Reason(err); r != tt.reason {
					t.Errorf("shed for %q, want %q", r, tt.reason)
				}
				leave()
				a.empty(t)
				mustEnter(t, &a, "a", tt.limits)() // a second time
			})
		})
	}
}

// A client leaves at the moment of its admission. Either the client gets the place, or
// the place goes to the next request.
func TestAdmissionLeftAtTheMomentOfAdmission(t *testing.T) {
	for range 200 {
		var a Queue
		leave := mustEnter(t, &a, "a", limits(1))
		ctx, cancel := context.WithCancel(t.Context())
		got := make(chan error, 1)
		go func() {
			leave, err := a.enter(ctx, "b", limits(1))
			if err == nil {
				leave()
			}
			got <- err
		}()
		for waits := false; !waits; {
			a.mu.Lock()
			waits = a.order.waiting == 1
			a.mu.Unlock()
		}
		var both sync.WaitGroup
		both.Go(cancel)
		both.Go(leave)
		both.Wait()
		if err := <-got; err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		a.empty(t)
	}
}

// A request that was admitted cannot return its ticket any more.
func TestAdmissionKeepsAnAdmittedTicket(t *testing.T) {
	var a Queue
	leave := mustEnter(t, &a, "a", limits(1))
	class := a.order.class(claim("b").Class)
	mine := &ticket{decided: make(chan struct{}), place: Place{queue: &a, class: class, flow: class.flow("b", 1), booked: 1}}
	a.order.add(mine)
	leave()
	if a.abandon(mine) {
		t.Error("abandon removed an admitted ticket")
	}
	<-mine.decided
	mine.place.Leave(0)
	a.empty(t)
}

func TestAdmissionCapCountsTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a Queue
		l := limits(1)
		l.PerClient = 2
		leave := mustEnter(t, &a, "a", l)
		queued := make(chan func(), 2)
		for range 2 {
			go func() {
				leave, err := a.enter(t.Context(), "b", l)
				if err != nil {
					t.Error(err)
				}
				queued <- leave
			}()
		}
		synctest.Wait()
		if _, err := a.enter(t.Context(), "b", l); err != ErrClientLimit {
			t.Errorf("a third one waits: %v", err)
		}
		leave()
		(<-queued)()
		(<-queued)()
		mustEnter(t, &a, "b", l)()
		a.empty(t)
	})
}

// Limits change while exchanges run. A lower limit does not stop running exchanges. A
// higher limit admits waiting requests when the next request arrives.
func TestAdmissionReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a Queue
		var leaves []func()
		for range 3 {
			leaves = append(leaves, mustEnter(t, &a, "a", limits(3)))
		}
		admitted := make(chan func(), 10)
		wait := func(l config.Limits) {
			go func() {
				leave, err := a.enter(t.Context(), "b", l)
				if err != nil {
					t.Error(err)
					return
				}
				admitted <- leave
			}()
			synctest.Wait()
		}
		wait(limits(1))
		leaves[0]()
		leaves[1]()
		synctest.Wait()
		if len(admitted) != 0 {
			t.Error("two requests run though the limit is 1")
		}
		wait(limits(5))
		if len(admitted) != 2 {
			t.Errorf("got %d requests admitted under the higher limit, want 2", len(admitted))
		}
		leaves[2]()
		(<-admitted)()
		(<-admitted)()
		a.empty(t)
	})
}

func TestAdmissionHammer(t *testing.T) {
	var a Queue
	var most sync.Map
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			client := fmt.Sprint(i % 4)
			for range 200 {
				ctx, cancel := context.WithCancel(t.Context())
				if rand.N(3) == 0 {
					go cancel()
				}
				l := config.Limits{MaxExchanges: 3 + rand.N(3), Queue: 20, QueueTimeout: config.Duration(rand.N(time.Millisecond) + 1), PerClient: rand.N(2) * 3}
				if leave, err := a.enter(ctx, client, l); err == nil {
					a.mu.Lock()
					if a.running > 5 {
						most.Store(a.running, true)
					}
					a.mu.Unlock()
					leave()
				}
				cancel()
			}
		})
	}
	wg.Wait()
	most.Range(func(n, _ any) bool { t.Errorf("%v ran at a time", n); return true })
	a.empty(t)
}

// By default a client may use only its share of the places and of the queue. Small limits
// have no shares.
func TestHalfOfTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a Queue
		l := config.Default().Limits
		l.MaxExchanges, l.Queue = 1, 200
		leave := mustEnter(t, &a, "x", l)
		var waiting sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		for _, client := range append(slices.Repeat([]string{"a"}, 100), "b") {
			waiting.Go(func() {
				if _, err := a.enter(ctx, client, l); !errors.Is(err, context.Canceled) {
					t.Errorf("%s: a.enter(ctx, client, l) = %v, want %v", client, err, context.Canceled)
				}
			})
		}
		synctest.Wait()
		if _, err := a.enter(ctx, "a", l); err != ErrClientLimit {
			t.Errorf("request beyond half of the places: error %v, want ErrClientLimit", err)
		}
		cancel()
		waiting.Wait()
		leave()
		a.empty(t)
		if l.Queue = 4; l.QueueShare() < l.Queue {
			t.Errorf("one client may use %d of %d places of the queue", l.QueueShare(), l.Queue)
		}
	})
}
