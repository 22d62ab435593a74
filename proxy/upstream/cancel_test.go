package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

var errClientGone = errors.New("client gone")

// stages are the points at which a context can end. By then the engine has sent all
// that it sends.
var stages = []struct {
	name  string
	op    string
	sent  bool
	dial  bool // hangs
	serve func(c *duplex)
	body  string // body of the request
}{
	{name: "dial", op: OpDial, dial: true},
	{name: "write blocked", op: OpWrite, sent: true, serve: func(c *duplex) { io.ReadFull(c, make([]byte, 10)) }, body: strings.Repeat("x", 1<<20)},
	{name: "waiting for the head", op: OpHead, sent: true, serve: func(c *duplex) { c.next() }},
	{name: "inside the head", op: OpHead, sent: true, serve: func(c *duplex) { c.next(); c.say("HTTP/1.1 200 OK\r\nX-A:") }},
	{name: "behind 103", op: OpHead, sent: true, serve: func(c *duplex) { c.next(); c.say("HTTP/1.1 103 Early Hints\r\n\r\n") }},
	{name: "body not begun", op: OpBody, sent: true, serve: func(c *duplex) { c.next(); c.say("HTTP/1.1 200 OK\r\n\r\n") }},
	{name: "inside a chunk", op: OpBody, sent: true, serve: func(c *duplex) {
		c.next()
		c.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab")
	}},
}

// TestCancel ends the context at every stage: the call ends at once with the cause, and
// the engine finds its connection closed.
func TestCancel(t *testing.T) {
	for _, tt := range stages {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				closed := false
				e := newEngine(t, func(c *duplex, _ int) {
					tt.serve(c)
					time.Sleep(2 * time.Second)
					_, err := c.Write([]byte("x"))
					closed = err != nil
				})
				cl := e.client(t, func(o *Options) {
					if tt.dial {
						o.Dial = hungDial
					}
				})
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				start := time.Now()
				time.AfterFunc(time.Second, func() { cancel(errClientGone) })
				resp, err := cl.Do(ctx, post(tt.body))
				if err == nil {
					_, err = io.Copy(io.Discard, resp)
					defer resp.Close()
				}
				f := fault(t, err, tt.op)
				if f.Sent != tt.sent || f.Timeout {
					t.Errorf("Sent %v Timeout %v", f.Sent, f.Timeout)
				}
				if !errors.Is(err, context.Canceled) || !errors.Is(err, errClientGone) {
					t.Errorf("got error %v, want Canceled with its cause", err)
				}
				if took := time.Since(start); took != time.Second {
					t.Errorf("the call took %v", took)
				}
				synctest.Wait()
				if s := cl.Stats(); s.Open != 0 {
					t.Errorf("cl.Stats() = %+v", s)
				}
				time.Sleep(2 * time.Second)
				synctest.Wait()
				if !tt.dial && !closed {
					t.Error("the engine still has its connection")
				}
			})
		})
	}
}

func TestEndedContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, answering)
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errClientGone)
		_, err := e.client(t, nil).Do(ctx, get())
		if f := fault(t, err, OpDial); f.Sent || !errors.Is(err, errClientGone) || e.dials() != 0 {
			t.Errorf("%v, %d connections", err, e.dials())
		}
	})
}

// The end of the context has no effect once the answer is complete: another call may
// use the connection by then.
func TestCancelAfterTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, answer := range []string{okAnswer, "HTTP/1.1 204 No Content\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"} {
			e := newEngine(t, func(c *duplex, _ int) {
				for c.next() != nil {
					c.say(answer)
				}
			})
			cl := e.client(t, nil)
			for range 3 {
				ctx, cancel := context.WithCancel(t.Context())
				resp, err := cl.Do(ctx, get())
				if err != nil {
					t.Fatal(err)
				}
				if _, err := io.Copy(io.Discard, resp); err != nil {
					t.Fatal(err)
				}
				cancel()
				synctest.Wait()
				if _, err := resp.Read(make([]byte, 1)); err != io.EOF {
					t.Errorf("Read after the end: %v", err)
				}
				resp.Close()
			}
			if e.dials() != 1 {
				t.Errorf("got %d connections", e.dials())
			}
		}
	})
}

// Close inside the body aborts: the engine sees the closed connection, and a blocked
// Read returns.
func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hungUp := false
		e := newEngine(t, func(c *duplex, _ int) {
			c.next()
			c.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
			hungUp = c.next() == nil
		})
		cl := e.client(t, nil)
		resp, err := cl.Do(t.Context(), &Request{Path: "/", IdleTimeout: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		p := make([]byte, 10)
		if n, err := resp.Read(p); n != 1 || err != nil {
			t.Fatalf("Read = %d, %v", n, err)
		}
		read := make(chan error)
		go func() {
			_, err := resp.Read(p)
			read <- err
		}()
		synctest.Wait()
		for range 2 {
			if err := resp.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		}
		if err := <-read; !errors.Is(err, ErrClosed) {
			t.Errorf("blocked Read: %v", err)
		}
		if _, err := resp.Read(p); !errors.Is(err, ErrClosed) {
			t.Errorf("Read after Close: %v", err)
		}
		synctest.Wait()
		if !hungUp {
			t.Error("the engine still has its connection")
		}
		if s := cl.Stats(); s.Open != 0 {
			t.Errorf("cl.Stats() = %+v", s)
		}
		if resp.Status != 200 || resp.Get("Transfer-Encoding") == "" {
			t.Errorf("head after Close: %d %v", resp.Status, resp.Header)
		}
	})
}

// Close of an unread answer that has arrived in full is still an abort, because the
// reader has not seen its end.
func TestCloseUnread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(c *duplex, _ int) { c.next(); c.say(okAnswer); c.next() })
		cl := e.client(t, nil)
		resp, err := cl.Do(t.Context(), get())
		if err != nil {
			t.Fatal(err)
		}
		resp.Close()
		synctest.Wait()
		if s := cl.Stats(); s.Open != 0 {
			t.Errorf("cl.Stats() = %+v", s)
		}
	})
}

// Bytes that arrived but were not read before the context ended are not returned.
func TestCancelBeforeRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(c *duplex, _ int) { c.next(); c.say(okAnswer); c.next() })
		cl := e.client(t, nil)
		ctx, cancel := context.WithCancelCause(t.Context())
		resp, err := cl.Do(ctx, get())
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Close()
		cancel(errClientGone)
		synctest.Wait()
		n, err := resp.Read(make([]byte, 10))
		if fault(t, err, OpBody); n != 0 || !errors.Is(err, errClientGone) {
			t.Errorf("Read = %d, %v", n, err)
		}
		if _, again := resp.Read(make([]byte, 10)); again != err {
			t.Errorf("second Read: %v", again)
		}
	})
}

func TestErrorText(t *testing.T) {
	for op, want := range map[string]string{
		OpCap: "await connection: x", OpDial: "dial engine: x", OpWrite: "send request: x",
		OpHead: "read answer head: x", OpBody: "read answer body: x",
	} {
		if got := (&Error{Op: op, Err: errors.New("x")}).Error(); got != want {
			t.Errorf("%s: Error = %q, want %q", op, got, want)
		}
	}
}

// A cause that wraps the context's own error is not joined with it again.
func TestContextError(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := fmt.Errorf("drain: %w", context.Canceled)
	cancel(cause)
	if got := contextError(ctx); got != cause {
		t.Errorf("contextError(ctx) = %v, want %v", got, cause)
	}
}
