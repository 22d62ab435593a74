package upstream

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestWithdraw: a call that is not wanted any more ends as a call whose context has ended, in
// each of its phases. A call that waits for a connection keeps its place.
func TestWithdraw(t *testing.T) {
	after := func(d time.Duration) func(*duplex, int) {
		return func(c *duplex, _ int) {
			for c.next() != nil {
				time.Sleep(d)
				c.say(okAnswer)
			}
		}
	}
	for name, tt := range map[string]struct {
		serve   func(*duplex, int)
		linger  time.Duration
		hangsUp bool // the call does not linger
		again   bool // the answer is wanted again after a second
		cap     int
		op      string        // "": the call gets its answer
		unsent  bool          // the request has not reached the engine
		took    time.Duration // after Withdraw; not known for a call with an answer
	}{
		"without linger":   {serve: after(time.Minute), op: OpHead},
		"far from its end": {serve: after(time.Minute), linger: time.Minute, hangsUp: true, op: OpHead},
		"lingers in vain":  {serve: after(time.Minute), linger: 2 * time.Second, op: OpHead, took: 2 * time.Second},
		"the answer comes": {serve: after(2 * time.Second), linger: 2 * time.Second},
		"is wanted again":  {serve: after(time.Minute), linger: 2 * time.Second, again: true, op: OpHead, took: 2 * time.Second},
		"reads the body": {serve: func(c *duplex, _ int) {
			c.next()
			c.say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no")
			c.next()
		}, op: OpBody},
		"the request is not all sent": {serve: func(c *duplex, _ int) { c.br.ReadByte(); time.Sleep(time.Minute) }, linger: time.Second, op: OpWrite},
		"waits for a connection":      {serve: after(5 * time.Second), cap: 1, op: OpCap, unsent: true, took: 4 * time.Second},
		"waits, and is wanted again":  {serve: after(5 * time.Second), cap: 1, again: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine(t, tt.serve)
				cl := e.client(t, func(o *Options) { o.MaxConns = tt.cap })
				if tt.cap > 0 {
					other := waits(t, cl, get())
					defer func() { <-other }()
				}
				var unwanted atomic.Bool
				req := post(strings.Repeat("x", 64<<10))
				req.Linger, req.Control = tt.linger, &fakeControl{unwanted: unwanted.Load, hangsUp: tt.hangsUp}
				done := waits(t, cl, req)
				time.Sleep(time.Second)
				cl.Withdraw()
				if over(done) {
					t.Fatalf("the call has ended although it is wanted: %v", <-done)
				}
				unwanted.Store(true)
				began := time.Now()
				cl.Withdraw()
				cl.Withdraw()
				if tt.again {
					synctest.Wait()
					unwanted.Store(false)
				}
				err := <-done
				if tt.op == "" {
					if err != nil {
						t.Errorf("no answer: %v", err)
					}
					return
				}
				var f *Error
				if !errors.As(err, &f) || f.Op != tt.op && !tt.unsent {
					t.Fatalf("got %v", err)
				}
				if !errors.Is(f, ErrUnwanted) || f.Sent == tt.unsent || f.Timeout || f.Detached != nil {
					t.Errorf("got %+v", f)
				}
				if took := time.Since(began); took != tt.took {
					t.Errorf("the call ended after %v, want %v", took, tt.took)
				}
			})
		})
	}
}
