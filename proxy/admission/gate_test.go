package admission

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
)

// engines are the engines of models for these tests. Each model can take so many further
// requests; a model that is missing can take all.
type engines struct {
	mu    sync.Mutex
	room  map[string]int // guarded by mu
	delay time.Duration  // guarded by mu
	each  time.Duration
}

func (e *engines) saturated(model string, further int) (delay, each time.Duration, saturated bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	room, limited := e.room[model]
	return e.delay, e.each, limited && further >= room
}

// set sets the room of a model.
func (e *engines) set(model string, room int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.room[model] = room
}

// gated returns a queue whose models have the given room.
func gated(room map[string]int) (*Queue, *engines) {
	e := &engines{room: room}
	return &Queue{Saturated: e.saturated}, e
}

// ends checks that the queue is empty and has forgotten all gates.
func (q *Queue) ends(t *testing.T) {
	t.Helper()
	synctest.Wait()
	q.empty(t)
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.order.gates) != 0 {
		t.Errorf("%d gates are left", len(q.order.gates))
	}
}

// modelClaim is a claim of a client for a model.
func modelClaim(client, model string) Claim {
	c := claim(client)
	c.Model = model
	return c
}

// TestGateHolds: a request of a saturated model waits though places are free, and requests of
// other models pass it, also those of the same client. It goes on when saturation falls.
func TestGateHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, e := gated(map[string]int{"full": 0})
		held := 0
		c := modelClaim("a", "full")
		c.Gated = func() { held++ }
		done := make(chan Place)
		go func() {
			p, err := q.Enter(t.Context(), c, limits(2))
			if err != nil {
				t.Error(err)
			}
			done <- p
		}()
		synctest.Wait()
		if held != 1 || q.Waiting() != 1 {
			t.Fatalf("%d held, %d wait", held, q.Waiting())
		}
		for _, other := range []Claim{modelClaim("a", "free"), claim("a")} {
			p, err := q.Enter(t.Context(), other, limits(2))
			if err != nil {
				t.Fatal(err)
			}
			p.Sent()
			p.Leave(0)
		}
		time.Sleep(time.Second)
		if q.Waiting() != 1 {
			t.Error("the saturated model got a place")
		}
		e.set("full", 1)
		p := <-done
		p.Sent()
		p.Sent()
		p.Leave(0)
		q.ends(t)
	})
}

// TestGateCountsUnsent: requests that have a place and no engine yet count, so that a falling
// load does not let all waiting requests go.
func TestGateCountsUnsent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, e := gated(map[string]int{"m": 0})
		in := make(chan Place, 9)
		for range 9 {
			go func() {
				p, err := q.Enter(t.Context(), modelClaim("a", "m"), limits(100))
				if err != nil {
					t.Error(err)
				}
				in <- p
			}()
		}
		synctest.Wait()
		e.set("m", 3)
		time.Sleep(time.Second)
		if len(in) != 3 || q.Waiting() != 6 {
			t.Fatalf("%d got a place, %d wait, want 3 and 6", len(in), q.Waiting())
		}
		for n := range 9 {
			p := <-in
			if n%2 == 0 {
				p.Sent()
			}
			p.Leave(0)
		}
		q.ends(t)
	})
}

// TestGateSheds: a request whose engines delay it beyond its deadline or beyond queue_timeout is
// refused at once.
func TestGateSheds(t *testing.T) {
	for _, tt := range []struct {
		name     string
		delay    time.Duration
		deadline time.Duration // 0: none
		seconds  int64         // of Retry-After; 0: the request waits
	}{
		{"longer than queue_timeout", 10*time.Second + 1, 0, 11},
		{"as long as queue_timeout", 10 * time.Second, 0, 0},
		{"longer than the deadline", 2500 * time.Millisecond, 2 * time.Second, 3},
		{"before the deadline", 2 * time.Second, 2500 * time.Millisecond, 0},
		{"unknown", 0, time.Millisecond, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q, e := gated(map[string]int{"m": 0})
				e.delay = tt.delay
				ctx := t.Context()
				if tt.deadline > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithDeadlineCause(ctx, time.Now().Add(tt.deadline), ErrDeadline)
					defer cancel()
				}
				began := time.Now()
				_, err := q.Enter(ctx, modelClaim("a", "m"), limits(1))
				var late *SaturatedError
				switch {
				case tt.seconds == 0 && time.Since(began) == 0:
					t.Errorf("refused after %v: %v", time.Since(began), err)
				case tt.seconds > 0 && (!errors.As(err, &late) || late.RetrySeconds() != tt.seconds || time.Since(began) != 0 || Reason(err) != "saturated"):
					t.Errorf("%v after %v, reason %s", err, time.Since(began), Reason(err))
				}
				q.ends(t)
			})
		})
	}
}

// TestGateEnds: a held request ends when its client leaves, when the proxy drains, at its deadline
// and after queue_timeout, and leaves nothing behind. The work of the engines is unknown, so that
// nothing shows before that the request comes too late.
func TestGateEnds(t *testing.T) {
	errLeft := errors.New("left")
	for _, want := range []error{errLeft, downstream.ErrDraining, ErrDeadline, ErrQueueTimeout} {
		synctest.Test(t, func(t *testing.T) {
			q, _ := gated(map[string]int{"m": 0})
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			switch want {
			case ErrQueueTimeout:
			case ErrDeadline:
				var end context.CancelFunc
				ctx, end = context.WithTimeoutCause(ctx, time.Second, want)
				defer end()
			default:
				time.AfterFunc(time.Second, func() { cancel(want) })
			}
			l := limits(1)
			l.PerClient = 5
			if _, err := q.Enter(ctx, modelClaim("a", "m"), l); !errors.Is(err, want) {
				t.Errorf("%v, want %v", err, want)
			}
			q.ends(t)
			time.Sleep(time.Minute)
			q.mu.Lock()
			defer q.mu.Unlock()
			if q.watching {
				t.Error("the queue still looks at gates")
			}
		})
	}
}

// TestGateRefusedElsewhere: a request that another limit refuses leaves no gate behind.
func TestGateRefusedElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, _ := gated(map[string]int{"m": 0})
		l := limits(1)
		l.Queue = 0
		if _, err := q.Enter(t.Context(), modelClaim("a", "m"), l); !errors.Is(err, ErrQueueFull) {
			t.Error(err)
		}
		l = limits(1)
		l.PerClient = 1
		leave := mustEnter(t, q, "a", l)
		if _, err := q.Enter(t.Context(), modelClaim("a", "m"), l); !errors.Is(err, ErrClientLimit) {
			t.Error(err)
		}
		leave()
		q.ends(t)
	})
}

// TestGateClasses: a class with only saturated models is not runnable, however long it waits, and
// gets no credit for this time. The order within a tenant and a model stays.
func TestGateClasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, e := gated(map[string]int{"full": 0})
		starving := testClass("starving", func(c *config.PriorityClass) { c.PromoteAfter = config.Duration(3 * time.Second) })
		other := testClass("other", nil)
		l := config.Limits{MaxExchanges: 1, Queue: 100, QueueTimeout: config.Duration(time.Hour)}
		var mu sync.Mutex
		var order []string
		var wg sync.WaitGroup
		send := func(class config.PriorityClass, model, name string) {
			wg.Go(func() {
				p, err := q.Enter(t.Context(), Claim{Client: class.Name, Class: class, Model: model, Tokens: 100}, l)
				if err != nil {
					t.Error(err)
					return
				}
				p.Sent()
				mu.Lock()
				order = append(order, name)
				mu.Unlock()
				time.Sleep(time.Second)
				p.Leave(0)
			})
			synctest.Wait()
		}
		leave := mustEnter(t, q, "first", l)
		for _, name := range []string{"s1", "s2", "s3", "s4"} {
			send(starving, "full", name)
		}
		for _, name := range []string{"o1", "o2", "o3", "o4", "o5", "o6"} {
			send(other, "free", name)
		}
		leave()
		time.Sleep(3500 * time.Millisecond) // o4 runs
		e.set("full", 100)
		wg.Wait()
		// The class starves when its gate opens, so it gets the next place, and then its share.
		want := []string{"o1", "o2", "o3", "o4", "s1"}
		for n, name := range want {
			if order[n] != name {
				t.Errorf("order %v, want %v first", order, want)
				break
			}
		}
		at := map[string]int{}
		for n, name := range order {
			at[name] = n
		}
		if at["s4"] < at["o6"] && at["s4"] < at["o5"] {
			t.Errorf("order %v: the class got credit for the time of saturation", order)
		}
		q.ends(t)
	})
}

// TestGateTenants: a tenant's tokens count over all its models, and a tenant whose model opens
// gets no credit. Many gates that open and close at the same time keep the order consistent.
func TestGateTenants(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, e := gated(map[string]int{"x": 0, "y": 0, "z": 0})
		l := config.Limits{MaxExchanges: 2, Queue: 10_000, QueueTimeout: config.Duration(time.Hour)}
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Second)
		defer cancel()
		var mu sync.Mutex
		got := map[string]int{}
		var wg sync.WaitGroup
		for _, client := range []string{"a", "b", "c"} {
			for n := range 12 {
				wg.Go(func() {
					c := modelClaim(client, []string{"x", "y", "z", "free"}[n%4])
					c.Tokens = 100
					for ctx.Err() == nil {
						p, err := q.Enter(ctx, c, l)
						if err != nil {
							return
						}
						p.Sent()
						time.Sleep(100 * time.Millisecond)
						mu.Lock()
						got[client]++
						mu.Unlock()
						p.Leave(0)
					}
				})
			}
		}
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				time.Sleep(70 * time.Millisecond)
				e.set([]string{"x", "y", "z"}[n%3], n/3%2*100)
			}
		})
		wg.Wait()
		if least, most := min(got["a"], got["b"], got["c"]), max(got["a"], got["b"], got["c"]); least < 1000 || most-least > most/20 {
			t.Errorf("shares %v", got)
		}
		q.ends(t)
	})
}

// TestGateSwitchedOff: held requests go on when a reload switches the limit off.
func TestGateSwitchedOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, e := gated(map[string]int{"m": 0})
		time.AfterFunc(time.Second, func() {
			e.mu.Lock()
			defer e.mu.Unlock()
			delete(e.room, "m")
		})
		p, err := q.Enter(t.Context(), modelClaim("a", "m"), limits(1))
		if err != nil {
			t.Fatal(err)
		}
		p.Leave(0)
		q.ends(t)
	})
}
