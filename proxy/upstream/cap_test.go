package upstream

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// seconds is an engine that takes one second for each request.
func seconds(c *duplex, _ int) {
	for c.next() != nil {
		time.Sleep(time.Second)
		c.say(okAnswer)
	}
}

func TestCapIsFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, seconds)
		cl := e.client(t, func(o *Options) { o.MaxConns = 2 })
		var mu sync.Mutex
		var order []int
		for i := range 10 {
			go func() {
				ask(t, cl, get())
				mu.Lock()
				order = append(order, i/2) // two calls finish together
				mu.Unlock()
			}()
			synctest.Wait()
		}
		if s := cl.Stats(); s.Open != 2 {
			t.Errorf("%+v at the cap of 2", s)
		}
		time.Sleep(5500 * time.Millisecond)
		mu.Lock()
		defer mu.Unlock()
		if !slices.Equal(order, []int{0, 0, 1, 1, 2, 2, 3, 3, 4, 4}) {
			t.Errorf("order %v", order)
		}
		if e.dials() != 2 {
			t.Errorf("got %d connections", e.dials())
		}
	})
}

func TestCapTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(c *duplex, _ int) { c.next(); c.next() })
		cl := e.client(t, func(o *Options) { o.MaxConns = 1 })
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go cl.Do(ctx, get())
		synctest.Wait()
		start := time.Now()
		_, err := cl.Do(t.Context(), &Request{Path: "/", HeadTimeout: 3 * time.Second})
		if f := fault(t, err, OpCap); f.Sent || !f.Timeout || time.Since(start) != 3*time.Second {
			t.Errorf("%+v after %v", f, time.Since(start))
		}
		gone, leave := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { leave(errClientGone) })
		_, err = cl.Do(gone, get())
		if f := fault(t, err, OpCap); f.Sent || f.Timeout || !errors.Is(err, errClientGone) || !errors.Is(err, context.Canceled) {
			t.Errorf("fault(err, OpCap) = %+v", f)
		}
		if s := cl.Stats(); s.Open != 1 || s.Waiting != 0 {
			t.Errorf("cl.Stats() = %+v", s)
		}
	})
}

// However a call ends, its slot goes to the next one.
func TestCapSlotsComeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fail := true
		e := newEngine(t, answering)
		cl := e.client(t, func(o *Options) {
			o.MaxConns = 1
			o.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if fail {
					return nil, errors.New("refused")
				}
				return e.dial(ctx, network, addr)
			}
		})
		for range 3 {
			_, err := cl.Do(t.Context(), get())
			fault(t, err, OpDial)
		}
		fail = false
		for i := range 6 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			resp, err := cl.Do(ctx, get())
			if err != nil {
				t.Fatalf("call %d: %v", i, err)
			}
			if i%2 == 0 {
				io.Copy(io.Discard, resp)
			}
			if i%3 == 0 {
				cancel()
			}
			resp.Close()
			cancel()
			synctest.Wait()
		}
	})
}

// An idle connection that is too old must not keep a call waiting at the cap.
func TestCapWithOldIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, answering)
		cl := e.client(t, func(o *Options) { o.MaxConns = 1 })
		ask(t, cl, get())
		p := &cl.(*client).pool
		p.mu.Lock()
		p.sweeper.Stop() // as if the sweeper were late
		p.mu.Unlock()
		time.Sleep(5 * time.Second)
		ask(t, cl, &Request{Path: "/", HeadTimeout: time.Second})
		if e.dials() != 2 {
			t.Errorf("got %d connections", e.dials())
		}
	})
}

// A connection was given to a call at the moment when the call gave up. The connection
// goes to the next call in the queue.
func TestCapHandOverToTheGone(t *testing.T) {
	var p pool
	p.maxConns, p.idleTimeout, p.maxIdle = 1, time.Hour, 1
	if c, err := p.take(&call{ctx: t.Context()}, 0); c != nil || err != nil {
		t.Fatal(c, err)
	}
	for _, give := range []bool{true, false} {
		first, second := make(chan *conn, 1), make(chan *conn, 1)
		p.mu.Lock()
		place := p.waiters.PushBack(first)
		p.waiters.PushBack(second)
		p.mu.Unlock()
		c := newConn(nil)
		if give {
			p.give(&call{}, c)
		} else {
			p.give(&call{}, nil)
			c = nil
		}
		p.leave(&call{}, place)
		select {
		case got := <-second:
			if got != c {
				t.Errorf("second got %p, want %p", got, c)
			}
		default:
			t.Error("second got nothing")
		}
		if s := p.stats(); s.Open != 1 || s.Waiting != 0 {
			t.Errorf("p.stats() = %+v", s)
		}
	}
}
