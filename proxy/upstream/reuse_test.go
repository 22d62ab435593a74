package upstream

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// stale lists the ways in which an engine handles the second request of a connection, and
// whether the call may be repeated on another connection.
var stale = []struct {
	name    string
	serve   func(c *duplex)
	retried bool
	op      string // of the failure when not retried
}{
	{name: "closed before the request", serve: func(c *duplex) {}, retried: true},
	{name: "closed while it reads the request", serve: func(c *duplex) { io.ReadFull(c, make([]byte, 10)) }, retried: true},
	{name: "closed behind the request", serve: func(c *duplex) { c.next() }, retried: true},
	{name: "closed soon after the request", serve: func(c *duplex) { c.next(); time.Sleep(staleWithin / 2) }, retried: true},
	{name: "died at its work", serve: func(c *duplex) { c.next(); time.Sleep(staleWithin) }, op: OpHead},
	{name: "closed inside the head", serve: func(c *duplex) { c.next(); c.say("HTTP") }, op: OpHead},
	{name: "closed behind 100", serve: func(c *duplex) { c.next(); c.say("HTTP/1.1 100 Continue\r\n\r\n") }, op: OpHead},
	{name: "silent", serve: func(c *duplex) { c.next(); time.Sleep(time.Hour) }, op: OpHead},
	{name: "nonsense", serve: func(c *duplex) { c.next(); c.say("nonsense\r\n\r\n"); c.next() }, op: OpHead},
}

func TestStaleConnection(t *testing.T) {
	for _, tt := range stale {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine(t, func(c *duplex, nth int) {
					if nth > 1 {
						answering(c, nth)
						return
					}
					c.next()
					c.say(okAnswer)
					time.Sleep(10 * time.Millisecond) // the pool would notice a FIN
					tt.serve(c)
				})
				cl := e.client(t, nil)
				ask(t, cl, post("1"))
				resp, err := cl.Do(t.Context(), &Request{Method: "POST", Path: "/", Body: [][]byte{[]byte("2")}, HeadTimeout: 5 * time.Second})
				if tt.retried {
					if err != nil {
						t.Fatal(err)
					}
					body, err := io.ReadAll(resp)
					if string(body) != "ok" || err != nil {
						t.Errorf("got body %q, %v", body, err)
					}
					resp.Close()
					return
				}
				if f := fault(t, err, tt.op); !f.Sent {
					t.Error("Sent is false")
				}
				if e.dials() != 1 {
					t.Errorf("%d connections: the request was repeated", e.dials())
				}
			})
		})
	}
}

// A request that must not reach the engine twice is not repeated once it may have been
// sent, in cases where another request would be.
func TestOnceIsNotRepeated(t *testing.T) {
	for _, tt := range []struct {
		name     string
		idem     bool // the client sent its own Idempotency-Key
		serve    func(c *duplex)
		repeated bool
	}{
		{name: "closed before the request", serve: func(c *duplex) {}, repeated: true},
		{name: "closed behind the request", serve: func(c *duplex) { c.next() }},
		{name: "closed behind the request, with a key", idem: true, serve: func(c *duplex) { c.next() }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine(t, func(c *duplex, nth int) {
					if nth > 1 {
						answering(c, nth)
						return
					}
					c.next()
					c.say(okAnswer)
					if tt.repeated {
						return
					}
					time.Sleep(10 * time.Millisecond)
					tt.serve(c)
				})
				cl := e.client(t, nil)
				ask(t, cl, post("1"))
				synctest.Wait()
				req := &Request{Method: "POST", Path: "/", Body: [][]byte{[]byte("2")}, Once: true}
				if tt.idem {
					req.Header = []Field{{Name: "Idempotency-Key", Value: "k"}}
				}
				resp, err := cl.Do(t.Context(), req)
				if tt.repeated {
					if err != nil {
						t.Fatal(err)
					}
					resp.Close()
					return
				}
				if f := fault(t, err, OpHead); !f.Sent || e.dials() != 1 {
					t.Errorf("%v, %d connections", err, e.dials())
				}
			})
		})
	}
}

// The repeated request is complete.
func TestRetrySendsAllAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []byte
		e := newEngine(t, func(c *duplex, nth int) {
			r := c.next()
			if nth > 1 {
				got, _ = io.ReadAll(r.Body)
			}
			c.say(okAnswer)
			c.next()
		})
		cl := e.client(t, nil)
		ask(t, cl, get())
		body := [][]byte{bytes.Repeat([]byte("a"), 50<<10), []byte("b"), bytes.Repeat([]byte("c"), 50<<10)}
		ask(t, cl, &Request{Method: "POST", Path: "/", Body: body})
		if want := bytes.Join(body, nil); !bytes.Equal(got, want) {
			t.Errorf("got %d bytes, want %d", len(got), len(want))
		}
	})
}

// If a new connection fails, the engine has failed: the client does not repeat the
// request.
func TestFreshConnectionIsNotRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(c *duplex, _ int) { c.next() })
		_, err := e.client(t, nil).Do(t.Context(), post("{}"))
		if f := fault(t, err, OpHead); !f.Sent || e.dials() != 1 {
			t.Errorf("%v, %d connections", err, e.dials())
		}
	})
}

// If a first try may have reached the engine and the second dial fails, the error reports that the
// request was sent.
func TestSentOutlivesTheRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(c *duplex, _ int) {
			c.next()
			c.say(okAnswer)
			c.next()
		})
		refused := errors.New("refused")
		cl := e.client(t, func(o *Options) {
			o.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if e.dials() > 0 {
					return nil, refused
				}
				return e.dial(ctx, network, addr)
			}
		})
		ask(t, cl, post("1"))
		_, err := cl.Do(t.Context(), post("2"))
		var f *Error
		if !errors.As(err, &f) || !f.Sent || !errors.Is(err, refused) {
			t.Errorf("got error %v, want a failed dial with Sent set", err)
		}
		if s := cl.Stats(); s.Open != 0 {
			t.Errorf("cl.Stats() = %+v", s)
		}
	})
}

func TestRetryCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(c *duplex, nth int) {
			c.next()
			c.say(okAnswer)
			c.next()
		})
		cl := e.client(t, nil)
		ask(t, cl, get())
		ask(t, cl, get())
		if s := cl.Stats(); s.Dials != 2 || s.Reuses != 1 || s.Retries != 1 || s.Open != 1 || s.Idle != 1 {
			t.Errorf("cl.Stats() = %+v", s)
		}
	})
}

// A cancel while the retry dials ends the call.
func TestCancelInRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(c *duplex, _ int) { c.next(); c.say(okAnswer); c.next() })
		cl := e.client(t, func(o *Options) {
			o.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if e.dials() > 0 {
					return hungDial(ctx, network, addr)
				}
				return e.dial(ctx, network, addr)
			}
		})
		ask(t, cl, get())
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		_, err := cl.Do(ctx, get())
		if f := fault(t, err, OpDial); !f.Sent || !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
		if s := cl.Stats(); s.Open != 0 {
			t.Errorf("cl.Stats() = %+v", s)
		}
	})
}

func TestNewestIdleFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var served [4]atomic.Int32
		e := newEngine(t, func(c *duplex, nth int) {
			for c.next() != nil {
				served[nth].Add(1)
				time.Sleep(time.Duration(nth) * time.Second)
				c.say(okAnswer)
			}
		})
		cl := e.client(t, nil)
		for range 3 {
			go ask(t, cl, get())
			synctest.Wait()
		}
		time.Sleep(3 * time.Second) // the third connection returns last
		synctest.Wait()
		ask(t, cl, get())
		if a, b, c := served[1].Load(), served[2].Load(), served[3].Load(); a != 1 || b != 1 || c != 2 {
			t.Errorf("requests per connection %d %d %d, want 1 1 2", a, b, c)
		}
	})
}

func TestIdleConnectionsExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(c *duplex, _ int) {
			for c.next() != nil {
				time.Sleep(time.Second)
				c.say(okAnswer)
			}
		})
		cl := e.client(t, nil)
		for range 2 {
			go ask(t, cl, get())
		}
		time.Sleep(2 * time.Second) // idle for 1 s
		ask(t, cl, get())           // one of them is idle until 3 s
		time.Sleep(2500 * time.Millisecond)
		synctest.Wait()
		if s := cl.Stats(); s.Open != 1 {
			t.Errorf("4.5 s after one and 2.5 s after the other: %+v", s)
		}
		time.Sleep(1600 * time.Millisecond)
		synctest.Wait()
		if s := cl.Stats(); s.Open != 0 {
			t.Errorf("4.1 s after the last: %+v", s)
		}
		ask(t, cl, get())
		if e.dials() != 3 {
			t.Errorf("got %d connections, want 3", e.dials())
		}
	})
}

func TestMaxIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(c *duplex, _ int) {
			for c.next() != nil {
				time.Sleep(time.Second)
				c.say(okAnswer)
			}
		})
		cl := e.client(t, func(o *Options) { o.MaxIdle = 2 })
		for range 5 {
			go ask(t, cl, get())
		}
		time.Sleep(1500 * time.Millisecond)
		synctest.Wait()
		if s := cl.Stats(); s.Open != 2 || s.Idle != 2 {
			t.Errorf("got %+v, want 2 idle", s)
		}
		cl.CloseIdle()
		synctest.Wait()
		if s := cl.Stats(); s.Open != 0 || s.Idle != 0 {
			t.Errorf("%+v after CloseIdle", s)
		}
	})
}
