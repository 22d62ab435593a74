package upstream

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// fakeControl is a CallControl with fixed answers. It records the engines that Evict
// was called with.
type fakeControl struct {
	evicts   bool
	unwanted func() bool // nil: always wanted
	hangsUp  bool        // Lingers returns false
	engines  []any
}

func (a *fakeControl) Wanted() bool  { return a.unwanted == nil || !a.unwanted() }
func (a *fakeControl) Useless() bool { return !a.Wanted() }
func (a *fakeControl) Lingers() bool { return !a.hangsUp }

func (a *fakeControl) Evict(engine any) bool {
	a.engines = append(a.engines, engine)
	return a.evicts
}

const quietFor = 200 * time.Millisecond

// waits starts a call to an engine that takes a minute, and returns the channel of its
// result.
func waits(t *testing.T, cl Client, req *Request) <-chan error {
	done := make(chan error, 1)
	go func() {
		resp, err := cl.Do(t.Context(), req)
		if err == nil {
			_, err = io.ReadAll(resp)
			resp.Close()
		}
		done <- err
	}()
	synctest.Wait()
	return done
}

// over reports whether a call has ended.
func over(done <-chan error) bool {
	synctest.Wait()
	return len(done) > 0
}

func TestEvictIdle(t *testing.T) {
	minute := func(c *duplex, _ int) {
		for c.next() != nil {
			time.Sleep(time.Minute)
			c.say(okAnswer)
		}
	}
	for name, tt := range map[string]struct {
		serve  func(c *duplex, nth int)
		waiter *fakeControl
		cap    int
		dial   bool // the dial does not end
		op     string
		sent   bool
	}{
		"waits for the head": {serve: minute, waiter: &fakeControl{evicts: true}, op: OpHead, sent: true},
		"waits for the body": {serve: func(c *duplex, _ int) {
			c.next()
			c.say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no")
			c.next()
		}, waiter: &fakeControl{evicts: true}, op: OpBody, sent: true},
		"waits for a connection":      {serve: minute, waiter: &fakeControl{evicts: true}, cap: 1, op: OpCap},
		"is being dialed":             {waiter: &fakeControl{evicts: true}, dial: true, op: OpDial},
		"is to wait":                  {serve: minute, waiter: &fakeControl{}},
		"has nobody to ask":           {serve: minute},
		"the request is not all sent": {serve: func(c *duplex, _ int) { c.br.ReadByte(); time.Sleep(time.Minute) }, waiter: &fakeControl{evicts: true}, op: OpWrite, sent: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine(t, tt.serve)
				cl := e.client(t, func(o *Options) {
					o.MaxConns = tt.cap
					if tt.dial {
						o.DialTimeout, o.Dial = time.Hour, stuck
					}
				})
				if tt.cap > 0 {
					other := waits(t, cl, get())
					defer func() { <-other }()
				}
				req := post(strings.Repeat("x", 64<<10))
				var waiter fakeControl
				if tt.waiter != nil {
					waiter = *tt.waiter
					req.Control = &waiter
				}
				done := waits(t, cl, req)
				time.Sleep(time.Second)
				cl.EvictIdle("it", quietFor)
				if tt.op == "" {
					if over(done) {
						t.Fatalf("the call ended: %v", <-done)
					}
					if err := <-done; err != nil {
						t.Errorf("the call has no answer: %v", err)
					}
					return
				}
				if !over(done) {
					t.Fatal("the call waits")
				}
				f := fault(t, <-done, tt.op)
				if !errors.Is(f, ErrEvicted) || f.Sent != tt.sent || f.Timeout || f.Detached != nil {
					t.Errorf("fault(<-done, tt.op) = %+v, want %+v", f, ErrEvicted)
				}
				if len(waiter.engines) != 1 || waiter.engines[0] != "it" {
					t.Errorf("Evict was called with %v", waiter.engines)
				}
				cl.EvictIdle("it", quietFor)
				if len(waiter.engines) != 1 {
					t.Error("Evict was called after the end of the call")
				}
			})
		})
	}
}

// stuck is a dial that blocks until its context ends.
func stuck(ctx context.Context, _, _ string) (net.Conn, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// Bytes on any call show that the engine is alive, if they came within quietFor.
func TestEvictIdleQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(c *duplex, nth int) {
			for c.next() != nil {
				if nth == 1 {
					time.Sleep(time.Hour)
				}
				c.say(okAnswer)
			}
		})
		cl := e.client(t, nil)
		w := &fakeControl{evicts: true}
		req := get()
		req.Control = w
		done := waits(t, cl, req)
		time.Sleep(time.Second)
		ask(t, cl, get())
		cl.EvictIdle("it", quietFor)
		time.Sleep(quietFor - time.Millisecond)
		cl.EvictIdle("it", quietFor)
		if over(done) || len(w.engines) > 0 {
			t.Fatal("the call was evicted although bytes arrived")
		}
		time.Sleep(time.Millisecond)
		cl.EvictIdle("it", quietFor)
		if !over(done) {
			t.Fatal("the call was not evicted although no byte arrived")
		}
		<-done
	})
}

// A committed call cannot be evicted. An evicted call cannot be committed.
func TestCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, commits := range []bool{true, false} {
			e := newEngine(t, func(c *duplex, _ int) {
				c.next()
				c.say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no")
				time.Sleep(time.Minute)
				c.say("k")
			})
			cl := e.client(t, nil)
			req := get()
			req.Control = &fakeControl{evicts: true}
			resp, err := cl.Do(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := resp.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			if commits && !resp.Commit() {
				t.Error("Commit = false: the call was already evicted")
			}
			time.Sleep(time.Second)
			cl.EvictIdle("it", quietFor)
			if !commits && resp.Commit() {
				t.Error("Commit = true for an evicted call")
			}
			if rest, err := io.ReadAll(resp); commits != (string(rest) == "k" && err == nil) {
				t.Errorf("the rest is %q: %v", rest, err)
			}
			resp.Close()
		}
	})
}

// An evicted call with Detach keeps its connection, and its answer can still be read.
func TestDetached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hungUp := make(chan struct{}, 1)
		e := newEngine(t, func(c *duplex, _ int) {
			for c.next() != nil {
				time.Sleep(time.Minute)
				c.say("HTTP/1.1 200 OK\r\n")
				time.Sleep(time.Second)
				c.say("Content-Length: 2\r\n\r\nok")
			}
			hungUp <- struct{}{}
		})
		cl := e.client(t, func(o *Options) { o.IdleTimeout = time.Hour })
		left := func(after time.Duration) *Detached {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel() // the end of the call's context does not affect the detached call
			req := post("x")
			req.Control, req.Detach, req.HeadTimeout = &fakeControl{evicts: true}, true, time.Hour
			time.AfterFunc(after, func() { cl.EvictIdle("it", quietFor) })
			_, err := cl.Do(ctx, req)
			f := fault(t, err, OpHead)
			if f.Detached == nil || !errors.Is(f, ErrEvicted) || !f.Sent {
				t.Fatalf("fault(err, OpHead) = %+v, want %+v", f, ErrEvicted)
			}
			return f.Detached
		}
		for _, after := range []time.Duration{time.Second, time.Minute + time.Second/2} { // also during the head
			resp, err := left(after).Await(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp)
			if resp.Close(); string(body) != "ok" || err != nil {
				t.Errorf("%q, %v", body, err)
			}
		}
		if s := cl.Stats(); s.Dials != 1 || s.Idle != 1 {
			t.Errorf("the connection was not used again: %+v", s)
		}
		left(time.Second).Close()
		<-hungUp
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := left(time.Second).Await(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got error %v of a detached call whose caller has stopped waiting", err)
		}
		<-hungUp
		if s := cl.Stats(); s.Open != 0 {
			t.Errorf("connections remain: %+v", s)
		}
	})
}

// The wait for the answer of an engine that has stopped reading can be evicted too.
func TestEvictEarlyAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(c *duplex, _ int) {
			io.ReadFull(c, make([]byte, 10))
			c.CloseRead() // the client's write fails
			time.Sleep(time.Minute)
		})
		cl := e.client(t, nil)
		go func() { // concurrently: the test must not be synchronized with the call
			time.Sleep(earlyWithin / 2)
			cl.EvictIdle(e, quietFor)
		}()
		began := time.Now()
		_, err := cl.Do(t.Context(), &Request{Method: "POST", Path: "/", Body: [][]byte{make([]byte, 1<<20)}, Control: &fakeControl{evicts: true}})
		if took := time.Since(began); !errors.Is(err, ErrEvicted) || took != earlyWithin/2 {
			t.Errorf("got %v after %v", err, took)
		}
	})
}
