package upstream

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

const lingerFor = 2 * time.Second

// lingers lists calls that are cancelled one second after they began, and the engine's
// reaction.
var lingers = []struct {
	name    string
	serve   func(c *duplex)
	answers bool          // Do returns an answer
	body    string        // as read
	bodyErr bool          // the body does not end regularly
	took    time.Duration // until the end of the body or the error
}{
	{
		name: "engine hangs up", took: 1500 * time.Millisecond,
		serve: func(c *duplex) { c.next(); time.Sleep(1500 * time.Millisecond) },
	},
	{
		name: "engine does nothing", took: time.Second + lingerFor,
		serve: func(c *duplex) { c.next(); time.Sleep(time.Hour) },
	},
	{
		name: "answer was under way", answers: true, body: "ok", took: 1500 * time.Millisecond,
		serve: func(c *duplex) { c.next(); time.Sleep(1500 * time.Millisecond); c.say(okAnswer) },
	},
	{
		name: "answer had begun", answers: true, body: "hello", took: 1500 * time.Millisecond,
		serve: func(c *duplex) {
			c.next()
			c.say("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe")
			time.Sleep(1500 * time.Millisecond)
			c.say("llo")
		},
	},
	{
		name: "answer without body", answers: true, took: 1500 * time.Millisecond,
		serve: func(c *duplex) {
			c.next()
			time.Sleep(1500 * time.Millisecond)
			c.say("HTTP/1.1 204 No Content\r\n\r\n")
		},
	},
	{
		name: "answer in pieces", answers: true, body: "hello", took: 2500 * time.Millisecond,
		serve: func(c *duplex) {
			c.next()
			time.Sleep(time.Second)
			for _, s := range []string{"HTTP/1.1 200 ", "OK\r\nContent-Length: 5\r\n\r\n", "hello"} {
				time.Sleep(500 * time.Millisecond)
				c.say(s)
			}
		},
	},
	{
		name: "body comes too late", answers: true, body: "he", bodyErr: true, took: time.Second + lingerFor,
		serve: func(c *duplex) {
			c.next()
			time.Sleep(1500 * time.Millisecond)
			c.say("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe")
			time.Sleep(time.Hour)
			c.say("llo")
		},
	},
	{
		name: "head comes too late", took: time.Second + lingerFor,
		serve: func(c *duplex) { c.next(); time.Sleep(time.Second + lingerFor + time.Second); c.say(okAnswer) },
	},
	{
		name: "half a head", took: 1500 * time.Millisecond,
		serve: func(c *duplex) { c.next(); c.say("HTTP/1.1 200 OK\r\n"); time.Sleep(1500 * time.Millisecond) },
	},
}

func TestLinger(t *testing.T) {
	for _, tt := range lingers {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine(t, func(c *duplex, _ int) { tt.serve(c) })
				cl := e.client(t, nil)
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				start := time.Now()
				time.AfterFunc(time.Second, func() { cancel(errClientGone) })
				resp, err := cl.Do(ctx, &Request{
					Path: "/", HeadTimeout: time.Minute, IdleTimeout: time.Minute, Linger: lingerFor,
				})
				if (err == nil) != tt.answers {
					t.Fatalf("Do: %v", err)
				}
				op := OpHead
				if err == nil {
					var body []byte
					if body, err = io.ReadAll(resp); string(body) != tt.body || (err != nil) != tt.bodyErr {
						t.Errorf("got body %q, %v", body, err)
					}
					resp.Close()
					op = OpBody
				}
				if took := time.Since(start); took != tt.took {
					t.Errorf("the call took %v, want %v", took, tt.took)
				}
				if err != nil {
					fault(t, err, op)
					if !errors.Is(err, context.Canceled) || !errors.Is(err, errClientGone) {
						t.Errorf("got error %v, want Canceled with its cause", err)
					}
				}
				synctest.Wait()
				if s := cl.Stats(); s.Open != s.Idle {
					t.Errorf("%+v: the call holds its connection", s)
				}
			})
		})
	}
}

// The connection stays open in both directions until the linger is over: a server that
// reads the end of the client's side drops its answer.
func TestLingerLeavesTheConnectionWhole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var seen time.Duration
		e := newEngine(t, func(c *duplex, _ int) {
			c.next()
			if c.next() == nil {
				seen = time.Since(start)
			}
		})
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		_, err := e.client(t, nil).Do(ctx, &Request{Path: "/", Linger: lingerFor})
		if f := fault(t, err, OpHead); !f.Timeout || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v is no time-out", err)
		}
		synctest.Wait()
		if seen != 3*time.Second+lingerFor {
			t.Errorf("hang-up seen after %v", seen)
		}
	})
}

// A call does not linger before all of the request is sent: the engine need not see the
// request.
func TestNoLingerBeforeTheRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(c *duplex, _ int) { io.ReadFull(c, make([]byte, 10)); time.Sleep(time.Hour) })
		ctx, cancel := context.WithCancel(t.Context())
		start := time.Now()
		time.AfterFunc(time.Second, cancel)
		req := post(strings.Repeat("x", 1<<20))
		req.Linger = time.Minute
		_, err := e.client(t, nil).Do(ctx, req)
		if fault(t, err, OpWrite); !errors.Is(err, context.Canceled) || time.Since(start) != time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
	})
}

// A call whose control refuses to linger ends at once. A call that has its answer does
// not call the control.
func TestLingerIsAsked(t *testing.T) {
	for _, hangsUp := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			e := newEngine(t, func(c *duplex, _ int) { c.next(); time.Sleep(2500 * time.Millisecond); c.say(okAnswer) })
			cl := e.client(t, nil)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			start := time.Now()
			resp, err := cl.Do(ctx, &Request{Path: "/", Linger: lingerFor, Control: &fakeControl{hangsUp: hangsUp}})
			if err == nil {
				resp.Close()
			}
			want := 2500 * time.Millisecond
			if hangsUp {
				want = time.Second
			}
			if took := time.Since(start); took != want || (err != nil) != hangsUp {
				t.Errorf("hangs up %v: %v after %v", hangsUp, err, took)
			}
		})
	}
}

// A request that is no longer needed when it gets a connection never reaches the engine,
// and the connection is free for the next call.
func TestUnwanted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen atomic.Int32
		e := newEngine(t, func(c *duplex, _ int) {
			for c.next() != nil {
				seen.Add(1)
				time.Sleep(time.Second)
				c.say(okAnswer)
			}
		})
		cl := e.client(t, func(o *Options) { o.MaxConns = 1 })
		first := waits(t, cl, get())
		var unwanted atomic.Bool
		req := get()
		req.Control = &fakeControl{unwanted: unwanted.Load}
		second := waits(t, cl, req)
		unwanted.Store(true)
		var ue *Error
		if err := <-second; !errors.Is(err, ErrUnwanted) || !errors.As(err, &ue) || ue.Sent || ue.Timeout {
			t.Errorf("got %+v", err)
		}
		if err := <-first; err != nil {
			t.Error(err)
		}
		if err := <-waits(t, cl, get()); err != nil {
			t.Error(err)
		}
		if synctest.Wait(); seen.Load() != 2 {
			t.Errorf("the engine saw %d requests", seen.Load())
		}
		if s := cl.Stats(); s.Open != s.Idle {
			t.Errorf("%+v: a call holds its connection", s)
		}
	})
}
