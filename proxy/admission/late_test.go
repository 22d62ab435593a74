package admission

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// lateTest is a queue at a saturated model, and the requests that wait there.
type lateTest struct {
	t       *testing.T
	q       *Queue
	engines *engines
	limits  config.Limits
}

// outcome is the end of one request.
type outcome struct {
	place Place
	err   error
	after time.Duration
}

// lateQueue returns a queue whose model "m" is saturated: its engines delay a new request by
// delay, and each request before it by a further second.
func lateQueue(t *testing.T, delay time.Duration) *lateTest {
	q, e := gated(map[string]int{"m": 0})
	e.delay, e.each = delay, time.Second
	l := config.Limits{MaxExchanges: 100, Queue: 1000, PerClient: 500, QueueTimeout: config.Duration(time.Minute)}
	return &lateTest{t, q, e, l}
}

// send sends a request, which waits; deadline 0: none.
func (l *lateTest) send(c Claim, deadline time.Duration) <-chan outcome {
	end := make(chan outcome, 1)
	go func() {
		ctx, began := l.t.Context(), time.Now()
		if deadline > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeoutCause(ctx, deadline, ErrDeadline)
			defer cancel()
		}
		p, err := l.q.Enter(ctx, c, l.limits)
		end <- outcome{p, err, time.Since(began)}
	}()
	synctest.Wait()
	return end
}

// refused checks that a request was refused at the first look after so long, with that delay.
func (l *lateTest) refused(end <-chan outcome, after, delay time.Duration) {
	l.t.Helper()
	got := <-end
	var late *SaturatedError
	if !errors.As(got.err, &late) || Reason(got.err) != "saturated" {
		l.t.Errorf("%v, want a refusal", got.err)
		return
	}
	if got.after < after || got.after > after+2*gateEvery || late.Delay != delay {
		l.t.Errorf("refused after %v for a delay of %v, want %v and %v", got.after, late.Delay, after, delay)
	}
}

// goOn opens the gate, and checks that the requests run and that nothing is left.
func (l *lateTest) goOn(ends ...<-chan outcome) {
	l.t.Helper()
	l.engines.set("m", 1000)
	for _, end := range ends {
		got := <-end
		if got.err != nil {
			l.t.Errorf("a request in time got %v", got.err)
		}
		got.place.Leave(0)
	}
	l.q.ends(l.t)
}

// TestHeldRequestsDelay: the requests that wait before a request count as a delay.
func TestHeldRequestsDelay(t *testing.T) {
	for _, tt := range []struct {
		name     string
		before   int
		deadline time.Duration
		late     bool
	}{
		{"none before", 0, 2400 * time.Millisecond, false},
		{"too many before", 2, 2400 * time.Millisecond, true},
		{"in time", 2, 2600 * time.Millisecond, false},
		{"queue_timeout", 60, 0, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := lateQueue(t, 500*time.Millisecond)
				var first []<-chan outcome
				for range tt.before {
					first = append(first, l.send(modelClaim("a", "m"), 0))
				}
				end := l.send(modelClaim("a", "m"), tt.deadline)
				if tt.late {
					l.refused(end, 0, 500*time.Millisecond+time.Duration(tt.before)*time.Second)
				} else {
					first = append(first, end)
				}
				time.Sleep(2 * gateEvery)
				l.goOn(first...)
			})
		})
	}
}

// TestHeldUntilLate: a request that waits is refused as soon as its deadline cannot be met any
// more, and not at its deadline.
func TestHeldUntilLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := lateQueue(t, 500*time.Millisecond)
		first := l.send(modelClaim("a", "m"), 0)
		l.refused(l.send(modelClaim("a", "m"), 4*time.Second), 2500*time.Millisecond, 1500*time.Millisecond)
		end := l.send(modelClaim("a", "m"), 4*time.Second)
		time.Sleep(time.Second)
		l.engines.mu.Lock()
		l.engines.delay = 2 * time.Minute // longer than queue_timeout, which bounds only the wait for the place
		l.engines.mu.Unlock()
		l.refused(end, time.Second, 2*time.Minute+time.Second)
		l.goOn(first)
	})
}

// TestLateDoNotDelay: requests that are refused delay no other request.
func TestLateDoNotDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := lateQueue(t, 500*time.Millisecond)
		first := l.send(modelClaim("a", "m"), 0)
		var late []<-chan outcome
		for range 5 {
			late = append(late, l.send(modelClaim("a", "m"), 1400*time.Millisecond))
		}
		last := l.send(modelClaim("a", "m"), 1600*time.Millisecond)
		for _, end := range late {
			l.refused(end, 0, 1500*time.Millisecond)
		}
		l.q.mu.Lock()
		if got := l.q.clients["a"]; got != (openRequests{2, 2}) {
			t.Errorf("the client has %+v, want the two requests in time", got)
		}
		l.q.mu.Unlock()
		l.goOn(first, last)
	})
}

// TestLateInOrder: only the requests that get their places first delay a request. Those of another
// tenant delay it by the shares of both. Other models and classes do not count.
func TestLateInOrder(t *testing.T) {
	own := modelClaim("b", "m")
	other := func(weight float64, tokens int64) func(n int) Claim {
		return func(n int) Claim {
			if n < 2 {
				return own
			}
			c := modelClaim("a", "m")
			c.Weight, c.Tokens = weight, tokens
			return c
		}
	}
	for _, tt := range []struct {
		name   string
		first  func(n int) Claim
		before int // of ten
	}{
		{"the own requests", func(int) Claim { return own }, 10},
		{"one other tenant", func(int) Claim { return modelClaim("a", "m") }, 1},
		{"five other tenants", func(n int) Claim { return modelClaim(fmt.Sprint("a", n%5), "m") }, 5},
		{"two own, and another tenant", other(1, 1), 5},
		{"two own, and a tenant with more weight", other(3, 1), 9},
		{"two own, and a tenant with more tokens", other(1, 100), 3},
		{"another model", func(int) Claim { return modelClaim("b", "other") }, 0},
		{"another class", func(int) Claim { c := own; c.Class = testClass("other", nil); return c }, 0},
	} {
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprint(tt.name, " late ", late), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					l := lateQueue(t, 500*time.Millisecond)
					l.engines.set("other", 0)
					var first []<-chan outcome
					for n := range 10 {
						first = append(first, l.send(tt.first(n), 0))
					}
					delay := 500*time.Millisecond + time.Duration(tt.before)*time.Second
					if late {
						l.refused(l.send(own, delay-100*time.Millisecond), 0, delay)
					} else {
						first = append(first, l.send(own, delay+100*time.Millisecond))
					}
					time.Sleep(2 * gateEvery)
					l.engines.set("other", 1000)
					l.goOn(first...)
				})
			})
		}
	}
}

// TestLateUnsent: requests that have a place and no engine yet delay a new request, too.
func TestLateUnsent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := lateQueue(t, 500*time.Millisecond)
		l.engines.set("m", 2)
		first := []<-chan outcome{l.send(modelClaim("a", "m"), 0), l.send(modelClaim("a", "m"), 0)}
		end := l.send(modelClaim("a", "m"), 2400*time.Millisecond)
		got := <-end
		var late *SaturatedError
		if !errors.As(got.err, &late) || late.Delay != 2500*time.Millisecond || got.after != 0 {
			t.Errorf("%v after %v", got.err, got.after)
		}
		l.goOn(first...)
	})
}

// TestLateInALongQueue: in a long queue the predictions are less frequent, and each request that
// comes too late is refused nevertheless.
func TestLateInALongQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := lateQueue(t, 0)
		l.engines.each = time.Millisecond
		l.limits.Queue, l.limits.PerClient = 3*lateEvery, 0
		var ends []<-chan outcome
		for range 3*lateEvery - 1 {
			ends = append(ends, l.send(modelClaim("a", "m"), 2*time.Second+time.Millisecond))
		}
		time.Sleep(4 * gateEvery)
		if n := l.q.Waiting(); n > 2*lateEvery || n < 2*lateEvery-100 {
			t.Errorf("%d requests wait, want those that come in time", n)
		}
		for _, end := range ends {
			if got := <-end; got.err == nil {
				t.Fatal("a request got a place")
			}
		}
		l.q.ends(t)
	})
}

// TestLateOpen: a request that waits for a place, while the engines have room, is not refused
// before its deadline.
func TestLateOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := lateQueue(t, 30*time.Second)
		l.engines.set("m", 1000)
		l.limits.MaxExchanges = 1
		first := <-l.send(modelClaim("a", "m"), 0)
		first.place.Sent()
		l.engines.set("other", 0)
		held := l.send(modelClaim("a", "other"), 0) // so that there are looks
		end := l.send(modelClaim("a", "m"), time.Second)
		if got := <-end; !errors.Is(got.err, ErrDeadline) || got.after != time.Second {
			t.Errorf("%v after %v, want the deadline", got.err, got.after)
		}
		l.engines.set("other", 1000)
		first.place.Leave(0)
		l.goOn(held)
	})
}
