package http1

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// requestContext is the context of one request. It ends when the client has left, when the
// request has been served, or when the context of the server ends. Its channel exists only if a
// caller wants one: most requests register a function instead, see AfterFunc. Handlers may keep it.
type requestContext struct {
	conn  *conn
	done  atomic.Pointer[doneContext] // nil: nobody has asked for the channel
	mu    sync.Mutex
	err   error    // nil: not ended; guarded by mu
	after []func() // guarded by mu; nil in the place of a stopped function
}

// doneContext is the part of a requestContext with a channel. Package context finds it by Value, and
// registers the contexts that are derived from the requestContext with it, without a goroutine.
type doneContext struct {
	context.Context
	cancel context.CancelCauseFunc
}

// Deadline implements context.Context. There is none.
func (x *requestContext) Deadline() (time.Time, bool) { return time.Time{}, false }

// Err implements context.Context.
func (x *requestContext) Err() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.err
}

// Value implements context.Context.
func (x *requestContext) Value(key any) any {
	if d := x.done.Load(); d != nil {
		if v := d.Value(key); v != nil { // only the key of package context has one
			return v
		}
	}
	if key == http.LocalAddrContextKey {
		return x.conn.nc.LocalAddr()
	}
	return x.conn.values.Value(key)
}

// Done implements context.Context.
func (x *requestContext) Done() <-chan struct{} {
	if d := x.done.Load(); d != nil {
		return d.Done()
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	d := x.done.Load()
	if d == nil {
		d = new(doneContext)
		d.Context, d.cancel = context.WithCancelCause(context.Background())
		if x.err != nil {
			d.cancel(context.Cause(x.conn.values))
		}
		x.done.Store(d)
	}
	return d.Done()
}

// AfterFunc is the method that context.AfterFunc looks for: f runs in its own goroutine when x
// ends. stop reports whether it has prevented this.
func (x *requestContext) AfterFunc(f func()) (stop func() bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.err != nil {
		go f()
		return func() bool { return false }
	}
	i := len(x.after)
	x.after = append(x.after, f)
	return func() bool {
		x.mu.Lock()
		defer x.mu.Unlock()
		if i >= len(x.after) || x.after[i] == nil {
			return false
		}
		x.after[i] = nil
		return true
	}
}

// cancel ends the context.
func (x *requestContext) cancel(cause error) {
	x.mu.Lock()
	if x.err != nil {
		x.mu.Unlock()
		return
	}
	x.err = context.Canceled
	d, after := x.done.Load(), x.after
	x.after = nil
	x.mu.Unlock()
	if d != nil {
		d.cancel(cause)
	}
	for _, f := range after {
		if f != nil {
			go f()
		}
	}
}
