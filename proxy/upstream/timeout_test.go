package upstream

import (
	"context"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// hold keeps a connection open, without reading requests, until the client closes it.
func hold(c *duplex) { io.Copy(io.Discard, c) }

func hungDial(ctx context.Context, _, _ string) (net.Conn, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// slow lists each way in which an engine can keep a call waiting, and when the call
// must give up.
var slow = []struct {
	name  string
	serve func(c *duplex, nth int)
	edit  func(*Options)
	req   func() *Request
	op    string
	sent  bool
	after time.Duration
}{
	{
		name: "dial", op: OpDial, after: 3 * time.Second,
		edit: func(o *Options) { o.Dial, o.DialTimeout = hungDial, 3*time.Second },
		req:  func() *Request { return &Request{Path: "/", HeadTimeout: time.Second} },
	},
	{
		name: "engine reads nothing", op: OpWrite, sent: true, after: 7 * time.Second,
		serve: func(c *duplex, _ int) { c.in.Read(make([]byte, 1)); time.Sleep(time.Hour) },
		edit:  func(o *Options) { o.WriteTimeout = 7 * time.Second },
		req:   func() *Request { return &Request{Path: "/"} },
	},
	{
		name: "engine reads nothing, head", op: OpWrite, sent: true, after: 2 * time.Second,
		serve: func(c *duplex, _ int) { c.in.Read(make([]byte, 1)); time.Sleep(time.Hour) },
		req:   func() *Request { return &Request{Path: "/", HeadTimeout: 2 * time.Second} },
	},
	{
		name: "no answer", op: OpHead, sent: true, after: 2 * time.Second,
		serve: func(c *duplex, _ int) { hold(c) },
		req:   func() *Request { return &Request{Path: "/", HeadTimeout: 2 * time.Second} },
	},
	{
		name: "half a head", op: OpHead, sent: true, after: 2 * time.Second,
		serve: func(c *duplex, _ int) { c.next(); c.say("HTTP/1.1 200 OK\r\nX-A: "); hold(c) },
		req:   func() *Request { return &Request{Path: "/", HeadTimeout: 2 * time.Second} },
	},
	{
		name: "informational only", op: OpHead, sent: true, after: 2 * time.Second,
		serve: func(c *duplex, _ int) {
			c.next()
			for range 3 {
				time.Sleep(500 * time.Millisecond)
				c.say("HTTP/1.1 102 Processing\r\n\r\n")
			}
			hold(c)
		},
		req: func() *Request { return &Request{Path: "/", HeadTimeout: 2 * time.Second} },
	},
	{
		name: "no body", op: OpBody, sent: true, after: 5 * time.Second,
		serve: func(c *duplex, _ int) { c.next(); c.say("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"); hold(c) },
		req: func() *Request {
			return &Request{Path: "/", HeadTimeout: time.Second, IdleTimeout: 5 * time.Second}
		},
	},
	{
		name: "body stops, each read has its own limit", op: OpBody, sent: true, after: 13 * time.Second,
		serve: func(c *duplex, _ int) {
			c.next()
			c.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
			for range 2 {
				time.Sleep(4 * time.Second)
				c.say("1\r\nx\r\n")
			}
			hold(c)
		},
		req: func() *Request {
			return &Request{Path: "/", HeadTimeout: time.Second, IdleTimeout: 5 * time.Second}
		},
	},
	{
		name: "framing alone is no body", op: OpBody, sent: true, after: 5 * time.Second,
		serve: func(c *duplex, _ int) {
			c.next()
			c.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
			for _, b := range "5;extension" {
				time.Sleep(time.Second)
				if _, err := c.Write([]byte{byte(b)}); err != nil {
					return
				}
			}
		},
		req: func() *Request { return &Request{Path: "/", IdleTimeout: 5 * time.Second} },
	},
	{
		name: "context deadline", op: OpHead, sent: true, after: 4 * time.Second,
		serve: func(c *duplex, _ int) { hold(c) },
		req:   func() *Request { return &Request{Path: "/", HeadTimeout: time.Minute} },
	},
}

func TestTimeouts(t *testing.T) {
	for _, tt := range slow {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine(t, tt.serve)
				cl := e.client(t, tt.edit)
				ctx := t.Context()
				if tt.name == "context deadline" {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.after)
					defer cancel()
				}
				start := time.Now()
				resp, err := cl.Do(ctx, tt.req())
				if err == nil {
					_, err = io.Copy(io.Discard, resp)
					defer resp.Close()
				}
				if took := time.Since(start); took != tt.after {
					t.Errorf("gave up after %v, want %v", took, tt.after)
				}
				f := fault(t, err, tt.op)
				if !f.Timeout || f.Sent != tt.sent {
					t.Errorf("Timeout %v Sent %v, want true %v", f.Timeout, f.Sent, tt.sent)
				}
				synctest.Wait()
				if s := cl.Stats(); s.Open != 0 {
					t.Errorf("%+v: the connection is still open", s)
				}
			})
		})
	}
}

// A deadline of one call must not affect the next call on its connection.
func TestLimitsEndWithTheirCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(c *duplex, _ int) {
			for i := 0; c.next() != nil; i++ {
				if i > 0 {
					time.Sleep(time.Hour)
				}
				c.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
				if i > 0 {
					time.Sleep(time.Hour)
				}
				c.say("1\r\nx\r\n0\r\n\r\n")
			}
		})
		cl := e.client(t, nil)
		ask(t, cl, &Request{Path: "/", HeadTimeout: time.Second, IdleTimeout: time.Second})
		if _, body := ask(t, cl, get()); body != "x" {
			t.Errorf("got body %q", body)
		}
		ask(t, cl, &Request{Path: "/", HeadTimeout: 2 * time.Hour})
		if e.dials() != 1 {
			t.Errorf("got %d connections", e.dials())
		}
	})
}

func TestSetIdleTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(c *duplex, _ int) {
			c.next()
			c.say("HTTP/1.1 200 OK\r\n\r\n")
			time.Sleep(50 * time.Second)
			c.say("x")
			hold(c)
		})
		resp, err := e.client(t, nil).Do(t.Context(), &Request{Path: "/", IdleTimeout: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Close()
		p := make([]byte, 10)
		if n, err := resp.Read(p); n != 1 || err != nil {
			t.Fatalf("Read = %d, %v", n, err)
		}
		resp.SetIdleTimeout(time.Second)
		start := time.Now()
		_, err = resp.Read(p)
		if f := fault(t, err, OpBody); !f.Timeout || time.Since(start) != time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
	})
}
