package http1

import (
	"context"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// requestContext is the context of one request. It ends when the client has left, when the
// request has been served, or when the context of the server ends. Its channel exists only if a
// caller wants one. Most callers need none, because they register themselves, see Register. Handlers may
// keep the context.
type requestContext struct {
	conn    *conn
	done    atomic.Pointer[doneContext] // nil: nobody has asked for the channel
	mu      sync.Mutex
	err     error     // nil: not ended; guarded by mu
	endings []ending  // guarded by mu; nil in the place of one that was unregistered
	room    [2]ending // memory of endings; guarded by mu
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

// ending has the method that a context calls at its end.
type ending = interface{ ContextEnded() }

// Register calls e.ContextEnded in its own goroutine when x ends, unless Unregister prevents this. It
// allocates nothing for the first two. e must be comparable.
func (x *requestContext) Register(e ending) {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch i := slices.Index(x.endings, nil); {
	case x.err != nil:
		go e.ContextEnded()
	case i >= 0:
		x.endings[i] = e
	case x.endings == nil:
		x.endings = append(x.room[:0], e)
	default:
		x.endings = append(x.endings, e)
	}
}

// Unregister reports whether it has prevented a call that Register has announced.
func (x *requestContext) Unregister(e ending) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	i := slices.Index(x.endings, e)
	if i >= 0 {
		x.endings[i] = nil
	}
	return i >= 0
}

// AfterFunc is the method that context.AfterFunc looks for: f runs in its own goroutine when x
// ends. stop reports whether it has prevented this.
func (x *requestContext) AfterFunc(f func()) (stop func() bool) {
	e := &afterFunc{f}
	x.Register(e)
	return func() bool { return x.Unregister(e) }
}

type afterFunc struct{ f func() }

// ContextEnded implements ending.
func (a *afterFunc) ContextEnded() { a.f() }

// cancel ends the context.
func (x *requestContext) cancel(cause error) {
	x.mu.Lock()
	if x.err != nil {
		x.mu.Unlock()
		return
	}
	x.err = context.Canceled
	d, endings := x.done.Load(), x.endings // nothing is registered from now on
	x.endings = nil
	x.mu.Unlock()
	if d != nil {
		d.cancel(cause)
	}
	for _, e := range endings {
		if e != nil {
			go e.ContextEnded()
		}
	}
	clear(endings) // a handler may keep x for long
}
