package upstream

import (
	"bytes"
	"context"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// Sent is called after the whole request was written and before the answer. Sent is not
// called for a request that was never sent.
func TestSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		read, answer := make(chan struct{}), make(chan struct{})
		e := newEngine(t, func(c *duplex, _ int) {
			<-read
			c.next()
			<-answer
			c.say(okAnswer)
			c.next()
		})
		var sent atomic.Int32
		req := &Request{Method: "POST", Path: "/", Body: [][]byte{bytes.Repeat([]byte("x"), 64<<10)}, Sent: func() { sent.Add(1) }}
		done := make(chan struct{})
		client := e.client(t, nil)
		go func() {
			defer close(done)
			ask(t, client, req)
		}()
		synctest.Wait()
		if n := sent.Load(); n != 0 {
			t.Errorf("called %d times while nothing was read", n)
		}
		close(read)
		synctest.Wait()
		if n := sent.Load(); n != 1 {
			t.Errorf("called %d times when all was read", n)
		}
		close(answer)
		<-done
		if n := sent.Load(); n != 1 {
			t.Errorf("called %d times in all", n)
		}
	})
}

// TestSendBy: an engine receives the request in time or not at all. The time for its
// answer is not affected.
func TestSendBy(t *testing.T) {
	const by = 2 * time.Second
	for _, tt := range []struct {
		name  string
		serve func(c *duplex, nth int)
		edit  func(e *engine, o *Options)
		busy  bool // another call uses the only connection
		op    string
		sent  bool
		after time.Duration
	}{
		{name: "sent in time", serve: func(c *duplex, _ int) { c.next(); time.Sleep(by + time.Second); c.say(okAnswer) }, after: by + time.Second},
		{name: "no connection is free", serve: func(c *duplex, _ int) { c.next(); hold(c) }, busy: true, op: OpCap, after: by},
		{name: "a connection is free too late", serve: func(c *duplex, nth int) { c.next(); time.Sleep(by); hold(c) }, busy: true, op: OpCap, after: by},
		{name: "the engine stops reading", serve: func(c *duplex, _ int) { c.in.Read(make([]byte, 1)); time.Sleep(time.Hour) }, op: OpWrite, sent: true, after: by},
		{name: "connected too late", serve: answering, op: OpWrite, after: by + time.Second, edit: func(e *engine, o *Options) {
			o.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
				time.Sleep(by + time.Second)
				return e.dial(ctx, network, address)
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine(t, tt.serve)
				cl := e.client(t, func(o *Options) {
					if o.MaxConns = 1; tt.edit != nil {
						tt.edit(e, o)
					}
				})
				if tt.busy {
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					go cl.Do(ctx, get())
					synctest.Wait()
				}
				start := time.Now()
				req := get()
				req.SendBy, req.HeadTimeout = start.Add(by), 10*time.Second
				resp, err := cl.Do(t.Context(), req)
				if took := time.Since(start); took != tt.after {
					t.Errorf("the call ended after %v, want %v", took, tt.after)
				}
				if tt.op == "" {
					if err != nil {
						t.Fatal(err)
					}
					resp.Close()
					return
				}
				if f := fault(t, err, tt.op); !f.Timeout || f.Sent != tt.sent {
					t.Errorf("fault(err, tt.op) = %+v", f)
				}
			})
		})
	}
}

type panicking struct{ CallControl }

func (panicking) Wanted() bool { panic("wanted") }

func (panicking) EarlyHints([]Field) { panic("hints") }

// TestPanicOfCaller: a panic of a function that the caller has passed to Do leaves neither the call
// nor its slot behind.
func TestPanicOfCaller(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(req *Request, o *Options)
	}{
		{"Wanted", func(req *Request, _ *Options) { req.Control = panicking{} }},
		{"Dial", func(_ *Request, o *Options) {
			dial, first := o.Dial, true
			o.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
				if first {
					first = false
					panic("dial")
				}
				return dial(ctx, network, address)
			}
		}},
		{"Sent", func(req *Request, _ *Options) { req.Sent = func() { panic("sent") } }},
		{"EarlyHints", func(req *Request, _ *Options) { req.Hints = panicking{} }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine(t, func(c *duplex, _ int) {
					for c.next() != nil {
						c.say("HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + okAnswer)
					}
				})
				req := get()
				cl := e.client(t, func(o *Options) {
					o.MaxConns = 1
					tt.edit(req, o)
				})
				func() {
					defer func() {
						if recover() == nil {
							t.Error("Do hid the panic")
						}
					}()
					cl.Do(t.Context(), req)
				}()
				if n := len(cl.(*client).pool.calls); n != 0 || cl.Stats().Open != 0 {
					t.Errorf("%d calls and %d connections are left", n, cl.Stats().Open)
				}
				cl.EvictIdle(t, 0) // hangs if a panic has left a mutex locked
				if resp, _ := ask(t, cl, get()); resp.Status != 200 {
					t.Errorf("the next call has status %d", resp.Status)
				}
			})
		})
	}
}
